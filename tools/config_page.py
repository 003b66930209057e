"""Write docs/config.md: every key of a config, from the docstrings of its dataclasses.

    python tools/config_page.py

A test fails when the page is not what this program writes, or when a key has no description.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from sizewise import methods
from sizewise.config import Config, EngineConfig, StopConfig
from sizewise.data.config import DataConfig
from sizewise.fleet.devices import EventConfig, FleetConfig, GroupConfig
from sizewise.fleet.round_policy import RoundPolicy
from sizewise.privacy.config import PrivacyConfig
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"

INTRODUCTION = """\
# The config

A run is a TOML file. Every key has a default; `sizewise run` without a file takes the
[embedded one](../src/sizewise/default.toml). `--set a.b=value` changes one value, an unknown key is
an error, and the run folder gets the complete file. Bytes are whole numbers, or text such as
`"20MB"` (10^6) or `"20MiB"` (2^20). From Python, the same tables are arguments of
`sizewise.federate`.

This page is made from the code by `python tools/config_page.py`.
"""

TABLES: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "fleet": FleetConfig,
    "[fleet.group]": GroupConfig,
    "[fleet.event]": EventConfig,
    "recipe": Recipe,
    "engine": EngineConfig,
    "engine.flower": RoundPolicy,
    "stop": StopConfig,
    "privacy": PrivacyConfig,
}

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def descriptions(cls: type) -> dict[str, str]:
    """Return what a dataclass and those that it extends say of their attributes, by name."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        _, _, section = (inspect.cleandoc(one.__doc__ or "")).partition("Attributes:\n")
        for name, text in re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section, re.M | re.S):
            found[name] = " ".join(text.split())
    return found


def kind(hint: Any) -> str:
    """Return a type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return "bytes"
    if origin in (typing.Union, types.UnionType):
        return kind(next(a for a in arguments if a is not type(None)))
    if origin is typing.Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        inside = arguments[0]
        return "tables" if dataclasses.is_dataclass(inside) else f"list: {kind(inside)}"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(hint):
        return "table"
    return _WORDS.get(hint, "any")


def default(field: "dataclasses.Field[Any]") -> str:
    """Return a default as TOML would have it."""
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else ""
    value = field.default
    if value in (None, ""):  # What its meaning says.
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def table(cls: type, own: bool = False) -> Iterator[str]:
    """Yield the lines of a table of keys.

    Args:
        cls: A dataclass.
        own: Leave out keys that are tables; they have headings of their own.
    """
    words, hints = descriptions(cls), typing.get_type_hints(cls, include_extras=True)
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in dataclasses.fields(cls):
        if own and kind(hints[field.name]) == "table":
            continue
        cells = (kind(hints[field.name]), default(field), words.get(field.name, ""))
        shown = " | ".join(cell.replace("|", "\\|") for cell in cells)
        yield f"| `{field.name}` | {shown} |"


def first_line(cls: type) -> str:
    """Return what a dataclass is, without the name of its table."""
    line = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
    text = re.sub(r"^The `\[[\w.]+\]` table[:.] ?", "", line)
    text = re.sub(r": `\[\[.*?\]\]`\.$", ".", text)
    return text[:1].upper() + text[1:]


def page() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION, "## At the top", "", *table(Config, own=True), ""]
    for name, cls in TABLES.items():
        lines += [f"## `[{name}]`", ""]
        lines += [first_line(cls), ""] if first_line(cls) else []
        lines += [*table(cls), ""]
    lines += ["## `[method]`", "", "`name`, and the options of the method that it names:", ""]
    for name in sorted(methods.files()):
        options = methods.find(name).Options
        lines += [f"### {name}", "", f"[{name}](methods/{name}.md)", ""]
        lines += [*table(options), ""] if dataclasses.fields(options) else ["No options.", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
