"""Build the wheel and the sdist, and try the wheel as a stranger would: `make release`.

    python tools/release.py [--out dist] [--python 3.12,3.13,3.14] [--quick]

Everything after the build happens in a new environment in a temporary folder. The wheel is
installed with the newest of everything but torch, which is the version of the lock. The default
config is run, two methods are compared, a model is exported to ONNX and run by onnxruntime. Every
extra is resolved without being installed, and the core also for other versions of Python. The end
is a table of seconds and megabytes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_ONNX = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
(given,) = session.get_inputs()
(found,) = session.run(None, {given.name: numpy.zeros((3, 1, 8, 8), numpy.float32)})
assert found.shape == (3, 10), found.shape
"""


class Failed(Exception):
    """A step that did not go well; its message says which, and what was printed."""


@dataclass
class Log:
    """What was done: a name, how long it took, and something worth knowing."""

    lines: list[tuple[str, float, str]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Time a step; what is put into the list is shown beside it."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        said: list[str] = []
        start = time.monotonic()
        yield said
        self.lines.append((name, time.monotonic() - start, ", ".join(said)))

    def table(self) -> str:
        """Return all steps as Markdown."""
        rows = [f"| {name} | {seconds:.1f} | {said} |" for name, seconds, said in self.lines]
        return "\n".join(["| step | seconds | |", "|---|---|---|", *rows])


def run(*command: str | Path, folder: Path) -> str:
    """Run a program in a folder and return what it printed; raise Failed with its complaints."""
    # Nothing of this checkout is to be found by what was installed.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode:
        words = " ".join(map(str, command))
        raise Failed(f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def megabytes(folder: Path) -> str:
    """Return how much the files in a folder take, in MB."""
    total = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{total / 1e6:,.0f} MB"


def build(out: Path, log: Log) -> Path:
    """Make wheel and sdist, look at what is in them, and return the wheel."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with log.step("build wheel and sdist") as said:
        for old in out.glob("sizewise-*"):
            old.unlink()
        run(sys.executable, "-m", "build", "--outdir", out, ROOT, folder=ROOT)
        wheel = out / f"sizewise-{version}-py3-none-any.whl"
        sdist = out / f"sizewise-{version}.tar.gz"
        said += [f"{path.name} {path.stat().st_size / 1e6:.2f} MB" for path in (wheel, sdist)]
    with log.step("twine check"):
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, folder=ROOT)
    files = zipfile.ZipFile(wheel).namelist()
    missing = {"sizewise/py.typed", "sizewise/default.toml"} - set(files)
    strange = [name for name in files if not name.startswith(("sizewise/", f"sizewise-{version}"))]
    if missing or strange:
        raise Failed(f"the wheel lacks {sorted(missing)} and has {strange}")
    return wheel


def extras(wheel: Path) -> list[str]:
    """Return the extras that a wheel offers."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Provides-Extra") or []


def install(wheel: Path, home: Path, log: Log) -> Path:
    """Install the wheel where there is nothing else, and return the folder of its programs."""
    pinned = re.search(r"^torch==.*$", (ROOT / "requirements.lock").read_text(), re.M)
    (home / "constraints.txt").write_text(f"{pinned[0] if pinned else ''}\n")
    programs = home / "environment" / "bin"
    with log.step("make an empty environment"):
        run(sys.executable, "-m", "venv", programs.parent, folder=home)
    with log.step("pip install the wheel") as said:
        run(programs / "pip", "install", "-q", "-c", "constraints.txt", wheel, folder=home)
        said += [megabytes(programs.parent), f"torch {pinned[0][7:] if pinned else 'newest'}"]
    return programs


def use(programs: Path, home: Path, log: Log) -> None:
    """Run what the README shows."""
    sizewise = programs / "sizewise"
    with log.step("sizewise run") as said:
        result = json.loads(run(sizewise, "run", "--out", "run", "--json", folder=home))
        said.append(f"accuracy {result['accuracy']:.1%}")
        if result["accuracy"] < 0.9:
            raise Failed("the default config ends below 90 %")
    with log.step("sizewise init, plan"):
        run(sizewise, "init", "mine.toml", "--data", "digits", "--model", "cnn", folder=home)
        run(sizewise, "plan", "mine.toml", folder=home)
    with log.step("sizewise compare, report"):
        compared = ("compare", "mine.toml", "--methods", "fedavg,heterofl", "--set", "rounds=2")
        run(sizewise, *compared, "--out", "compared", folder=home)
        run(sizewise, "report", "run", "--out", "run.html", folder=home)
    with log.step("sizewise export") as said:
        export = ("export", "run", "--memory", "20MB", "--json")
        facts = json.loads(run(sizewise, *export, "--out", "phone.safetensors", folder=home))
        said.append(f"{facts['parameters']:,} parameters")
    with log.step("pip install sizewise[onnx], export, onnxruntime") as said:
        # It is installed, so its extra is found without an index that has sizewise.
        onnx = ("install", "-q", "-c", "constraints.txt", "sizewise[onnx]")
        run(programs / "pip", *onnx, folder=home)
        run(sizewise, *export, "--out", "phone.onnx", folder=home)
        run(programs / "python", "-c", RUN_ONNX, "phone.onnx", folder=home)
        said.append(megabytes(programs.parent))


def resolve(wheel: Path, programs: Path, home: Path, log: Log, pythons: list[str]) -> None:
    """Ask pip what each extra, and the core with other Pythons, would install."""
    pip = (programs / "pip", "install", "-q", "-c", "constraints.txt")
    dry = (*pip, "--dry-run", "--report", "report.json")
    for extra in extras(wheel):
        with log.step(f"resolve [{extra}]") as said:
            run(*dry, f"{wheel}[{extra}]", folder=home)
            found = json.loads((home / "report.json").read_text())["install"]
            said.append(f"{len(found)} packages to add")
    for version in pythons:
        with log.step(f"resolve for Python {version}") as said:
            there = ("--python-version", version, "--only-binary=:all:", "--target", "nowhere")
            run(*dry, "--ignore-installed", *there, wheel, folder=home)
            found = json.loads((home / "report.json").read_text())["install"]
            said.append(f"{len(found)} wheels")


def main() -> int:
    """Do all of it, and print the table."""
    parser = argparse.ArgumentParser(description="Build sizewise, and try what was built.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", default="3.12,3.13,3.14", help="others to resolve for")
    parser.add_argument("--quick", action="store_true", help="resolve no extras and no Pythons")
    chosen = parser.parse_args()
    log = Log()
    try:
        wheel = build(chosen.out.resolve(), log)
        with tempfile.TemporaryDirectory(prefix="sizewise-release-") as folder:
            home = Path(folder)
            programs = install(wheel, home, log)
            use(programs, home, log)
            if not chosen.quick:
                resolve(wheel, programs, home, log, [v for v in chosen.python.split(",") if v])
    except Failed as error:
        print(f"{log.table()}\n\nfailed: {error}")
        return 1
    print(log.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
