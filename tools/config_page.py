"""Write docs/config.md: every key of a config, from the docstrings of its dataclasses.

    python tools/config_page.py

A test fails when the page is not what this program writes, or when a key has no description.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from sizewise import methods
from sizewise.config import Config, MethodConfig
from sizewise.data import AUGMENTATIONS
from sizewise.errors import ConfigError
from sizewise.families.base import Method
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"

INTRODUCTION = """\
# The config

A run is a TOML file. Every key has a default; `sizewise run` without a file takes the
[embedded one](../src/sizewise/default.toml). `--set a.b=value` changes one value, an unknown key is
an error, and the run folder gets the complete file. Bytes are whole numbers, or text such as
`"20MB"` (10^6) or `"20MiB"` (2^20). From Python, the same tables are arguments of
`sizewise.federate`. What has no default may be left out.

The last column says for which methods a key counts: those whose devices send no weights leave keys
of the merge alone, and what a method cannot do it refuses with a sentence.

This page is made from the code by `python tools/config_page.py`.
"""

# Of what devices send: nothing to those that send no weights.
MERGE = ("weighting", "upload", "merge", "server")

# A task that every method takes, to be asked what else they take.
EXAMPLE = Task(ModelConfig("resnet20"), Recipe(), input_shape=(3, 32, 32), classes=10)

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
        return f"`{json.dumps(value)}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def alternatives(name: str) -> dict[Any, Task]:
    """Return the example with values of a key of its recipe that a method might refuse."""
    hint = typing.get_type_hints(Recipe, include_extras=True)[name]
    values: tuple[Any, ...] = (10**9,) if name == "eval_memory" else ()
    if get_origin(hint) is typing.Literal:
        values = tuple(value for value in get_args(hint) if value != getattr(Recipe, name))
    return {value: replace(EXAMPLE, recipe=Recipe(**{name: value})) for value in values}


def refuses(method: type[Method], task: Task) -> bool:
    """Return whether a method at its defaults says that it cannot do a task."""
    try:
        method(task)
    except ConfigError:
        return True
    return False


def everyone() -> dict[str, type[Method]]:
    """Return the methods of sizewise by name."""
    return {name: methods.find(name) for name in sorted(methods.files())}


def all_but(without: Iterable[str]) -> str:
    """Return a cell for all methods but some."""
    names = sorted(without)
    return f"all but {', '.join(names)}" if names else "all"


def counts_for(field: "dataclasses.Field[Any]") -> str:
    """Return for which methods a key outside of `[recipe]` and `[method]` counts."""
    if field.name == "anatomy":
        return "those that take models apart, as `sizewise plan` says"
    if field.name == "model":
        return ", ".join(name for name, method in everyone().items() if method.own_models)
    if field.name == "weights":
        task = replace(EXAMPLE, model=replace(EXAMPLE.model, weights="file.safetensors"))
        return all_but(name for name, method in everyone().items() if refuses(method, task))
    if field.name in ("budgets", "memory"):
        ignoring = (name for name, m in everyone().items() if m.Options().ignores_budgets)
        return all_but(ignoring)
    if field.name in ("ratios", "ratio", "scenario"):
        return "all, as bytes; as they are: those with `assign`"
    return "all"


def counts_in_recipe(field: "dataclasses.Field[Any]") -> str:
    """Return for which methods a key of the recipe counts, and which values some refuse."""
    known = everyone()
    # Keys such as `server_lr` count where another optimiser than the default may be chosen.
    asked = "server" if field.name.startswith("server_") else field.name
    refusing = {
        value: frozenset(name for name, method in known.items() if refuses(method, task))
        for value, task in alternatives(asked).items()
    }
    without = frozenset.intersection(*refusing.values()) if refusing else frozenset()
    if field.name.startswith(MERGE):
        without |= {name for name, method in known.items() if "weights" not in method.discloses}
    words = [all_but(without)]
    for names in dict.fromkeys(refusing.values()):
        if rest := sorted(names - without):
            values = ", ".join(f"`{value}`" for value, who in refusing.items() if who == names)
            words.append(f"{values} not with {', '.join(rest)}")
    return "; ".join(words)


def table(
    cls: type, own: bool = False, readers: "Callable[[dataclasses.Field[Any]], str] | None" = None
) -> Iterator[str]:
    """Yield the lines of a table of keys.

    Args:
        cls: A dataclass.
        own: Leave out keys that are tables; they have headings of their own.
        readers: Gives the last cell of a key, for which methods it counts.
    """
    words, hints = descriptions(cls), typing.get_type_hints(cls, include_extras=True)
    yield f"| key | type | default | meaning |{' methods |' if readers else ''}"
    yield f"|---|---|---|---|{'---|' if readers else ''}"
    for field in dataclasses.fields(cls):
        if own and kind(hints[field.name]) == "table":
            continue
        meaning = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", words.get(field.name, ""))
        cells = [kind(hints[field.name]), default(field), meaning]
        cells += [readers(field)] if readers else []
        shown = " | ".join(cell.replace("|", "\\|") for cell in cells)
        yield f"| `{field.name}` | {shown} |"


def tables(cls: type, before: str = "") -> Iterator[tuple[str, type]]:
    """Yield the tables inside of a table, and those in them, by their names in TOML."""
    for name, hint in typing.get_type_hints(cls).items():
        inside = next((a for a in get_args(hint) if dataclasses.is_dataclass(a)), None)
        found = hint if dataclasses.is_dataclass(hint) else inside
        if isinstance(found, type) and found is not MethodConfig:
            path = f"{before}{name}"
            yield f"[{path}]" if found is inside else path, found
            yield from tables(found, f"{path}.")


def first_line(cls: type) -> str:
    """Return what a dataclass is, without the name of its table."""
    line = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
    text = re.sub(r"^The `\[[\w.]+\]` table[:.] ?", "", line)
    text = re.sub(r": `\[\[.*?\]\]`\.$", ".", text)
    return text[:1].upper() + text[1:]


def page() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION, "## At the top", ""]
    lines += [*table(Config, own=True, readers=counts_for), ""]
    for name, cls in tables(Config):
        lines += [f"## `[{name}]`", ""]
        lines += [first_line(cls), ""] if first_line(cls) else []
        readers = counts_in_recipe if cls is Recipe else counts_for
        lines += [*table(cls, readers=readers), ""]
        if cls is Recipe:
            lines += ["Names for `augment`:", ""]
            lines += [*(f"- `{name}`: {said}" for name, said in AUGMENTATIONS.items()), ""]
    lines += ["## `[method]`", "", "`name`, and the options of the method that it names:", ""]
    for name, method in everyone().items():
        options = method.Options
        lines += [f"### {name}", "", f"[{name}](methods/{name}.md)", ""]
        lines += [*table(options), ""] if dataclasses.fields(options) else ["No options.", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
