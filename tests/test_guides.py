"""The guides, followed to the letter: their files are written, their commands are run, in order."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from commands import sizewise
from sizewise.families.base import Method
from sizewise.report import records
from sizewise.runs import catalogue

ROOT = Path(__file__).resolve().parent.parent
GUIDES = (
    *("tutorial", "bring-your-own-model", "add-a-method"),
    *("choose-a-method", "questions", "reproduce"),
)
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and nothing of what a guide adds left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("sizewise_methods", "my_model")):
            del sys.modules[name]


def follow(guide: str) -> list[str]:
    """Do what a guide says; return its commands."""
    commands = []
    for kind, name, content in BLOCK.findall((ROOT / f"docs/{guide}.md").read_text()):
        if name:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(content)
        elif kind == "console":
            for line in content.splitlines():
                program, *arguments = shlex.split(line.removeprefix("$ "))
                assert program == "sizewise", line
                answer = sizewise(*arguments)
                assert answer.code == 0, (line, answer.err)
                commands.append(line)
    return commands


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_can_be_followed(guide: str) -> None:
    assert follow(guide)
    if guide == "add-a-method":
        method_is_everywhere()


def method_is_everywhere() -> None:
    """The guide's method is short, listed, compared and in the report."""
    assert len(Path("sizewise_methods/top.py").read_text().splitlines()) < 100
    assert catalogue.names("methods")["top"].startswith("a device trains the head")
    rows = [run.row for run in records.read([Path("compared")])]
    assert rows == ["exclusive", "top"]
    assert "top" in Path("report.html").read_text()
    # It does what it says: the small devices take part, with all but some blocks.
    plan = records.read([Path("compared")])[1].plan
    small, large = plan
    assert small["refused"] is None
    assert small["parts"][0]["stages"] == []
    assert all(part["stages"] == [1] for part in large["parts"])


@pytest.mark.usefixtures("_elsewhere")
def test_a_method_that_cannot_be_imported_is_one_sentence() -> None:
    Path("sizewise_methods").mkdir()
    Path("sizewise_methods/broken.py").write_text('"""Broken: it is."""\nimport nothing_like_it\n')
    assert catalogue.names("methods")["broken"] == "it is."
    answer = sizewise("run", "--set", "method.name=broken", "--out", "run")
    assert answer.code == 2
    assert "broken.py' cannot be imported: No module named 'nothing_like_it'" in answer.err
    assert not Path("run").exists()


@pytest.mark.usefixtures("_elsewhere")
def test_a_built_in_method_cannot_be_replaced() -> None:
    Path("sizewise_methods").mkdir()
    Path("sizewise_methods/fedavg.py").write_text('"""Other: not it."""\n')
    assert "not it" not in catalogue.names("methods")["fedavg"]


def test_the_guide_names_every_member_of_a_method() -> None:
    text = (ROOT / "docs" / "add-a-method.md").read_text()
    members = {name for name in vars(Method) if not name.startswith("_")} | {"task"}
    assert {name for name in members if f"`{name}" not in text} == set()
