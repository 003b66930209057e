"""The reproductions: their programs can be imported, their suites are configs that can be run."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sizewise import config

PAPERS = Path(__file__).resolve().parent.parent / "papers"
FILES = {path: tomllib.loads(path.read_text()) for path in sorted(PAPERS.glob("*/*.toml"))}
SUITES = {f"{path.parent.name}-{path.stem}": f for path, f in FILES.items() if "scale" in f}
SUITE = runpy.run_path(str(PAPERS / "suite.py"))

# Scripts are run from their own folders, which all have a `shared.py` of their own.
IMPORT = """
import runpy, sys
for script in sys.argv[1:]:
    folder = script.rpartition("/")[0]
    sys.path.insert(0, folder)
    for name in ("shared", "common"):
        sys.modules.pop(name, None)
    assert callable(runpy.run_path(script, run_name="smoke").get("main", print)), script
    sys.path.remove(folder)
print("all")
"""


def test_every_program_can_be_imported() -> None:
    scripts = sorted(map(str, PAPERS.rglob("*.py")))
    assert len(scripts) > 20
    command = [sys.executable, "-c", IMPORT, *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr


@pytest.mark.parametrize("name", SUITES)
def test_every_row_of_every_suite_is_a_config(name: str) -> None:
    """An option that was renamed would show here, not after a night."""
    suite = SUITES[name]
    for scale in suite["scale"]:
        rows, seeds = SUITE["rows_of"](suite, scale)
        assert rows
        assert seeds
        assert all(config.from_dict(tables) for tables in rows.values())


def test_the_other_files_are_configs() -> None:
    plain = [path for path, content in FILES.items() if "scale" not in content]
    assert plain
    assert all(config.load(path).rounds > 0 for path in plain)


TINY = """
[base]
rounds = 1
fleet = { devices = 4, per_round = 2 }
model = { name = "linear" }
data = { train_limit = 80, test_limit = 40 }
[scale.mini]
seeds = [0]
[row.plain]
method = { name = "fedavg" }
[row.prox]
method = { name = "fedprox" }
"""


def test_a_suite_runs_and_writes_its_table(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    command = [sys.executable, str(PAPERS / "suite.py"), "tiny.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "tiny.mini.md").read_text()
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| plain", "| prox"]
    assert (tmp_path / "tiny.mini.json").exists()
