"""Runs programs of `papers/` and `benchmarks/` here, where torch has been imported already."""

import gc
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (str(ROOT / "papers"), str(ROOT / "benchmarks"))


class Failed(Exception):
    """A program ended with a code other than 0, or with a message."""


def run(script: Path, *arguments: str | Path) -> None:
    """Run a program as if by `python SCRIPT ARGUMENT...`; fail if it does not end well."""
    try:
        with _alone(script, *arguments):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise Failed(f"{script.name}: {end.code}") from end
    finally:
        gc.collect()  # What a script leaves goes while its own test runs.


def defined(script: Path) -> dict[str, Any]:
    """Return what a program defines, without running it."""
    with _alone(script):
        return runpy.run_path(str(script))


@contextmanager
def _alone(script: Path, *arguments: str | Path) -> Iterator[None]:
    """Let a program see its own folder first, and no modules of other programs."""
    argv, path, others = sys.argv, list(sys.path), _forgotten()
    sys.argv = [str(script), *map(str, arguments)]
    sys.path.insert(0, str(script.parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        _forgotten()
        sys.modules.update(others)


def _forgotten() -> dict[str, ModuleType]:
    """Return the modules that are called like programs, and forget them.

    Folders have some of the same names, and the folder `tests/common` may be one, too.
    """
    names = {path.stem for folder in FOLDERS for path in Path(folder).rglob("*.py")}
    return {name: sys.modules.pop(name) for name in sorted(names & sys.modules.keys())}


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of all Markdown tables but for their lines; fail if one is incomplete."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.M):
        head, line, *rows = [row[1:-1].split("|") for row in block.splitlines()]
        assert set(line) == {"---"}, block
        assert rows, block
        assert {len(row) for row in rows} == {len(head)} == {len(line)}, block
        assert "nan" not in block, block
        found.append([[cell.strip() for cell in row] for row in (head, *rows)])
    assert found, text
    return found
