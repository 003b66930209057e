"""Every public name, config key and option is in the reference; pytest counts them."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import sizewise
from sizewise import cutting, errors, federate, methods
from sizewise.cli.options import INTERRUPTED
from sizewise.common.structure import plain
from sizewise.config import Config, parsed

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
CONFIG = (ROOT / "docs/config.md").read_text(encoding="utf-8")
FOLDER = (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")


# ---- names


def programs() -> Iterator[str]:
    """Yield the Python code that our pages and examples show."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        yield from re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    for path in (ROOT / "examples").glob("*.py"):
        yield path.read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def shown(program: str) -> Iterator[str]:
    """Yield the dotted names that a program takes from sizewise, those of its modules included."""
    tree = ast.parse(program)
    places = {"sizewise": "sizewise"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sizewise":
            for alias in node.names:
                places[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, _, rest = ast.unparse(node).partition(".")
            if base in places and inspect.ismodule(found(places[base])):
                yield f"{places[base]}.{rest}"


def found(name: str) -> Any:
    """Return what a dotted name stands for; None: the end of it is no name of ours."""
    thing: Any = sizewise
    for part in name.split(".")[1:]:
        try:
            thing = getattr(thing, part)
        except AttributeError:
            if not inspect.ismodule(thing):
                return None
            thing = importlib.import_module(f"{thing.__name__}.{part}")
    return thing


def is_ours(thing: Any) -> bool:
    """Return whether something is a class or function of sizewise."""
    home = getattr(thing, "__module__", None) or ""
    return (inspect.isclass(thing) or inspect.isfunction(thing)) and home.startswith("sizewise")


@cache
def public() -> dict[str, Any]:
    """Return all public classes and functions, by the names under which they are found."""
    names = [f"sizewise.{name}" for name in sizewise.__all__]
    for name in ("session", "deployment"):
        members = vars(getattr(sizewise, name)).items()
        home = getattr(sizewise, name).__name__
        names += [
            f"sizewise.{name}.{member}"
            for member, thing in members
            if member[0] != "_" and is_ours(thing) and thing.__module__ == home
        ]
    names += [f"sizewise.errors.{name}" for name, thing in vars(errors).items() if is_ours(thing)]
    names += [f"sizewise.cutting.{name}" for name in cutting.__all__]
    names += sorted({name for program in programs() for name in shown(program)})
    return {name: found(name) for name in dict.fromkeys(names) if is_ours(found(name))}


@cache
def directives() -> dict[str, str]:
    """Return what is on the reference page, with the kind of its entry."""
    listed = re.findall(r"^\.\. auto(\w+):: (\S+)$", REFERENCE, re.M)
    assert len(listed) == len({name for _, name in listed}), "a name is there twice"
    return {name: kind for kind, name in listed}


@pytest.mark.parametrize("name", public())
def test_public_name_is_in_the_reference(name: str) -> None:
    thing = public()[name]
    entries = [entry for entry in directives() if found(entry) is thing]
    assert entries, f"docs/reference.md lacks {name}"
    assert inspect.getdoc(thing), f"{name} has no docstring"


def test_names_of_the_package_are_all_looked_at() -> None:
    looked_at = public().keys()
    others = {"sizewise.View", "sizewise.session", "sizewise.deployment"}  # A type, two modules.
    assert {f"sizewise.{name}" for name in sizewise.__all__} - looked_at == others
    assert "sizewise.exchange.view.View" in directives()


@pytest.mark.parametrize("name", directives())
def test_entry_of_the_reference_is_what_it_says(name: str) -> None:
    kind, thing = directives()[name], found(name)
    checks = {
        "class": inspect.isclass,
        "function": inspect.isfunction,
        "exception": inspect.isclass,
    }
    assert kind == "data" or checks[kind](thing)


# ---- keys


def keys(cls: type, table: str = "") -> Iterator[str]:
    """Yield every key of a config, with the table that it is in; lists of tables included."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        inside = next((a for a in typing.get_args(hint) if dataclasses.is_dataclass(a)), hint)
        if field.name == "method" and cls is Config:
            continue
        if dataclasses.is_dataclass(inside):
            yield from keys(typing.cast(type, inside), f"{table}{field.name}.")
        else:
            yield f"{table}{field.name}"


KEYS = list(keys(Config))


@cache
def rows() -> dict[str, list[str]]:
    """Return the cells of every key on the config page."""
    rows, table = {}, ""
    for line in CONFIG.splitlines():
        if line.startswith("## "):
            table = "".join(re.findall(r"[\w.]+(?=\])", line))
        if key := re.match(r"\| `(\w+)` \|", line):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            rows[f"{table}.{key[1]}".lstrip(".")] = cells
    return rows


@pytest.mark.parametrize("key", KEYS)
def test_config_key_is_on_its_page(key: str) -> None:
    _, kind, _, meaning, readers = rows()[key]
    assert kind
    assert meaning
    assert readers


OPTIONS = [
    pytest.param(name, option, id=f"{name}.{option.name}")
    for name in methods.names()
    for option in dataclasses.fields(methods.find(name).Options)
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_option_is_on_the_page_of_its_method(
    name: str, option: "dataclasses.Field[object]"
) -> None:
    text = (ROOT / f"docs/methods/{name}.md").read_text(encoding="utf-8")
    row = re.search(rf"^\|[^|]*`{option.name}`[^|]*\|([^|]*)\|", text, re.M)
    assert row, "add a row to the table of its options"
    said, is_empty = row[1].strip(" `"), option.default in (None, (), dataclasses.MISSING)
    same = said in ("", "none", "[]", "{}") if is_empty else parsed(said) == plain(option.default)
    assert same, f"the default is {option.default!r}"


def test_keys_that_do_not_count_change_nothing(tmp_path: Path) -> None:
    """What the page says of methods whose devices send no weights, tried."""
    for name in ("weighting", "upload", "server"):
        assert rows()[f"recipe.{name}"][-1].startswith("all but")
        assert "local" in rows()[f"recipe.{name}"][-1]
    said = {"weighting": "equal", "upload": "bf16", "server": "fedadam", "server_lr": 0.5}
    results = [
        federate("linear", method="local", rounds=1, out=tmp_path / f"{n}", recipe=recipe).result
        for n, recipe in enumerate([{}, said])
    ]
    assert results[0]["sizes"] == results[1]["sizes"]
    assert results[0]["state_sha256"] == results[1]["state_sha256"]


# ---- files and exit codes


def test_files_of_a_run_and_their_keys_are_on_their_page(tmp_path: Path) -> None:
    federate(
        "mlp",
        budgets=["10kB", "1MB"],
        method="heterofl",
        rounds=2,
        out=tmp_path / "run",
        data_options={"validation": 0.2, "train_limit": 400},
    )
    seen = 0
    for path in (tmp_path / "run").iterdir():
        assert f"`{path.name}{'/' if path.is_dir() else ''}`" in FOLDER, path.name
        if path.name not in ("result.json", "tokenizer.json") and path.suffix in (
            ".json",
            ".jsonl",
        ):
            for key in json_keys(path):
                seen += 1
                assert f"`{key}`" in FOLDER, f"{path.name}: {key}"
    assert seen > 60


def json_keys(path: Path) -> set[str]:
    """Return the keys of the objects in a file, down to those of the stages of a plan."""
    text = path.read_text(encoding="utf-8")
    whole = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else None
    found = json.loads(text) if whole is None else whole
    objects = found if isinstance(found, list) else [found]
    objects += [
        stage for each in objects for stage in each.get("stages", []) if isinstance(stage, dict)
    ]
    return {key for each in objects for key in each}


def test_exit_codes_are_on_the_page_of_the_command_line() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    codes = {thing.exit_code for thing in vars(errors).values() if is_ours(thing)}
    for code in {0, INTERRUPTED, *codes}:
        assert re.search(rf"^\| {code} \|", page, re.M), code
