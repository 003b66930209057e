"""What the documents say is true: their code runs, and every method has its page."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sizewise.report import summary
from sizewise.runs import catalogue

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


def test_there_is_code_to_run():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_code_in_the_documents_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "document", "exec"), {})  # noqa: S102  (our own documents)


def test_every_method_has_a_page_and_is_in_the_readme():
    names = ("README.md", "docs/features.md", "docs/index.md")
    readme, features, index = ((ROOT / name).read_text() for name in names)
    for name in catalogue.names("methods"):
        assert (ROOT / f"docs/methods/{name}.md").is_file(), name
        assert f"`{name}`" in readme, name
        assert f"`{name}`" in features, name
        assert f"methods/{name}.md" in index, name


def test_every_key_of_a_config_is_on_its_page() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "config_page.py"))
    text = (ROOT / "docs" / "config.md").read_text()
    assert text == made["page"](), "run `python tools/config_page.py`"
    assert not [line for line in text.splitlines() if line.endswith("|  |")], "no description"


def test_the_table_is_what_compare_prints() -> None:
    sizes = {"half": 0.5, "full": 0.6}
    result = {"accuracy": 0.6, "sizes": sizes, "steps": 1, "bytes_up": 1, "bytes_down": 1}
    result |= {"flops": 1e11, "peak_bytes": {"a": 1}, "refused": [{"times": 1}], "seconds": 200.0}
    head, *_ = summary.markdown([summary.summarise("m", {0: result})]).splitlines()
    assert head in (ROOT / "docs/index.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda s: s.stem)
def test_examples_run(script):
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"accuracy ([0-9.]+)", done.stdout)
    assert accuracy
    assert float(accuracy[1]) > 0.85
    if script.stem == "own_data":
        assert len(re.findall(r"\b[0-9a-f]{16}\b", done.stdout)) == 11
        assert "2 different states for 2 splits" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_run(path, tmp_path):
    """Their cells, one after another, as a program; there may be nothing to display with."""
    cells = json.loads(path.read_text())["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "IPython").mkdir()
    (tmp_path / "IPython" / "display.py").write_text("IFrame = print\n")
    (tmp_path / "notebook.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "phone.md").exists()


def test_a_comparison_of_your_own_takes_25_lines():
    """A model in a cell, a DataFrame, four methods, a report, and a model that is loaded again."""
    cells = json.loads((ROOT / "examples/your_model_your_frame.ipynb").read_text())["cells"]
    code = "".join("".join(c["source"]) + "\n" for c in cells if c["cell_type"] == "code")
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    for part in ("nn.Sequential", ".frame", "compare(", "report(", "export(", "deployment.load("):
        assert part in code
    assert re.search(r"methods=\[" + ", ".join([r'"\w+"'] * 4) + r"\]", code)
