"""The rooms of the house: what may import what, and that each says what lives in it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sizewise

HOME = Path(sizewise.__file__).parent
PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"

# From low to high: a room imports only those before it, and itself.
ROOMS = [
    *("errors", "common", "torch_tools", "steps", "exchange", "fleet", "privacy", "cutting"),
    *("surgery", "memory", "data", "models", "training", "families", "methods", "config"),
    *("engines", "runs", "report", "flower", "api", "cli"),
]
FILES = {path.relative_to(HOME).with_suffix("") for path in HOME.rglob("*.py")}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of sizewise that a file imports, also inside functions."""
    known = {".".join(file.parts).removesuffix(".__init__") for file in FILES}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sizewise":
            home = (node.module or "").partition(".")[2]
            for alias in node.names:
                name = f"{home}.{alias.name}" if home else alias.name
                yield name if name in known else home
        elif isinstance(node, ast.Import):
            yield from (n.name.partition(".")[2] for n in node.names if "sizewise." in n.name)


def test_every_room_is_in_the_list() -> None:
    found = {path.stem for path in HOME.iterdir() if path.name[0] not in "_."}
    assert found - {"py", "default"} == set(ROOMS)  # py.typed and default.toml


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_those_below(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1], ""}
    home = HOME / room
    files = sorted(home.rglob("*.py")) if home.is_dir() else [home.with_suffix(".py")]
    wrong = [
        f"{path.relative_to(HOME)} imports {name}"
        for path in files
        for name in imports(path)
        if name.partition(".")[0] not in allowed
    ]
    assert not wrong


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = {
        ".".join(file.parts).removesuffix(".__init__"): set(imports(HOME / f"{file}.py"))
        for file in FILES
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("room", [room for room in ROOMS if (HOME / room).is_dir()])
def test_every_room_says_what_lives_in_it(room: str) -> None:
    text = ast.get_docstring(ast.parse((HOME / room / "__init__.py").read_text(encoding="utf-8")))
    assert text
    assert len(text) > 100, "a paragraph"
    assert f"`{room}`" in PAGE.read_text(encoding="utf-8")


def test_the_page_shows_the_rooms_in_this_order() -> None:
    drawn = re.findall(r"^\| `(\w+)`", PAGE.read_text(encoding="utf-8"), re.M)
    assert drawn == ROOMS
