"""A reader has only the repository: nothing in it refers to documents that are not there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["src", "tests", "papers", "benchmarks", "docs", "examples", "tools"]
SUFFIXES = {".py", ".md", ".toml", ".ipynb"}
OUTSIDE = re.compile(
    r"""
      \bMETHODS(?:\s+\d|'|,\s+section)   # sections of a specification
    | \b(?:FINDINGS|DESIGN|HOUSE|METHODS)\.md\b | \bFINDINGS\b
    | \b[Pp]romise\s+\d | \b[Oo]ur\s+notes\b | \bConformance\s+test\s+\d | "Must\sshow"
    | \b[NVS]\d{2,3}\b                   # its list of tables and figures
    | \(.{0,40}\b[BCE]\d{1,2}\)          # its list of errors and contradictions
    | \bP[1-7]\b                         # its numbers of partitions
    | \btest_n?\d\d_                     # its numbers of tests
    | \.\./shared/ | /work/
    """,
    re.VERBOSE,
)
LINT = re.compile(r"# noqa.*")


def pages() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


def references(text: str) -> list[str]:
    return [found[0] for found in OUTSIDE.finditer(LINT.sub("", text))]


def test_nothing_refers_to_what_a_reader_does_not_have() -> None:
    found = {
        str(path.relative_to(ROOT)): references(path.read_text(encoding="utf-8"))
        for path in pages()
        if path != Path(__file__).resolve()
    }
    assert len(found) > 300
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        *("(METHODS 2.12)", "as METHODS\n12.2 found", "METHODS' `x`", "METHODS, section 13"),
        *("see FINDINGS", "Promise 6: nothing", "in our notes", "N39 to N42", "11 (S122)", "(B13)"),
        *("METHODS 14.2, B14)", "(METHODS 3.5, C19)", "P1: shuffle", "def test_07_whole()"),
    ],
)
def test_search_would_find(text: str) -> None:
    assert references(text)


@pytest.mark.parametrize(
    "text",
    ["yield from METHODS & dotted", "(D4)", "x = 1  # noqa: S603", "F1 of entities", "(B, C)"],
)
def test_search_lets_pass(text: str) -> None:
    assert not references(text)
