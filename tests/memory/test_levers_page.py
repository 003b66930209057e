"""The figures on docs/levers.md are what the code gives."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/levers.md").read_text()


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks/levers.py"))


def test_the_example_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    block, printed = re.findall(r"```(?:python|text)\n(.*?)```", PAGE, re.S)
    exec(compile(block, "document", "exec"), {})  # noqa: S102  (our own document)
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("name", ["cnn", "vit", "encoder"])
def test_the_tables_hold_the_predicted_bytes(benchmark: dict[str, Any], name: str) -> None:
    case = benchmark["CASES"][name]
    (part,) = [text for text in PAGE.split("\n### ") if text.startswith(f"{case.title}\n")]
    shown = re.findall(r"^\| (?!levers|-)(.*)\| [\d.]+ \|$", part, re.M)
    lines = benchmark["table"](benchmark["rows"](case, 0)).splitlines()[2:]
    assert shown == [line.removeprefix("| ").removesuffix("|  |") for line in lines]
