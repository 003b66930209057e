"""What is released: one version, extras that exist, workflows whose actions cannot change."""

import re
import tomllib
from pathlib import Path

import pytest

import sizewise

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_there_is_one_version() -> None:
    version = PROJECT["version"]
    assert sizewise.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert releases[:2] == ["Unreleased", version]
    assert f"sizewise-{version}-py3" in (ROOT / "docs/install.md").read_text(encoding="utf-8")


def test_hints_name_extras_that_exist() -> None:
    pages = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    named = {
        extra
        for text in texts
        for extras in re.findall(r"(?:sizewise|any\.whl|'\.)\[(\w+)\]", text)
        for extra in extras.split(",")
    }
    assert {"flower", "onnx", "text"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


def test_the_page_of_extras_has_them_all() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    for extra in PROJECT["optional-dependencies"]:
        assert re.search(rf"^\|[^|]*`{extra}`", page, re.M), extra


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_pythons_of_the_metadata_are_those_that_are_tested() -> None:
    named = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.M)
    tests = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    assert f"python: {named}".replace("'", '"') in tests
    (torch,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    assert f"{torch.replace('>=', '==')}.*" in tests
