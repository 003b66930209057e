"""What the scripts of all papers share: their arguments, and how a table or a figure is saved.

With `--smoke` a script does the least that runs all of its code, in seconds, and writes into the
current folder. The tests run every script so.
"""

import argparse
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sizewise.report.comparison import folder_name

# Paul Tol's colour-blind safe colours, as in `sizewise.report.figures`.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
SMOKE = "smoke"
SCALES = ("mini", "paper")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the first line of a script's docstring."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0])


def add_smoke(parser: argparse.ArgumentParser) -> None:
    """Let a script be asked for the least that runs all of its code."""
    parser.add_argument("--smoke", action="store_true", help="in seconds, into the current folder")


def scale(doc: str | None, default: str) -> str:
    """Return the scale that the command line asks for: mini, paper or smoke."""
    arguments = parser(doc)
    arguments.add_argument("--scale", choices=SCALES, default=default)
    add_smoke(arguments)
    given = arguments.parse_args()
    return SMOKE if given.smoke else str(given.scale)


def target(script: str, scale: str, suffix: str) -> Path:
    """Return SCRIPT.SCALE.SUFFIX beside a script, or in the current folder for a smoke run."""
    path = Path(script)
    return (Path() if scale == SMOKE else path.parent) / f"{path.stem}.{scale}.{suffix}"


def save(figure: Figure, path: Path) -> None:
    """Write a figure, the same bytes every time, and say where it is."""
    pyplot.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(path)


def write(lines: list[str], path: Path) -> None:
    """Write Markdown, show it, and say where it is."""
    text = "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text)
    print(path)


def table(*heads: str) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|---" * len(heads) + "|"]


def plain(axes: Axes) -> None:
    """Leave out the upper and the right line of a panel."""
    axes.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class Runs:
    """What `suite.py` has left of a suite at a scale, under `runs/papers/`.

    Attributes:
        suite: The suite's file.
        scale: One of its scales.
    """

    suite: Path
    scale: str

    @property
    def folder(self) -> Path:
        """Where the runs are."""
        return Path(
            "runs/papers", f"{self.suite.parent.resolve().name}-{self.suite.stem}-{self.scale}"
        )

    def beside(self, script: str, suffix: str) -> Path:
        """Return SCRIPT.SCALE.SUFFIX beside the suite, where a script's results go."""
        return self.suite.parent / f"{Path(script).stem}.{self.scale}.{suffix}"

    @property
    def tables(self) -> dict[str, Any]:
        """The content of the suite's file."""
        return tomllib.loads(self.suite.read_text(encoding="utf-8"))

    def begun(
        self, rows: list[str] | None = None, mark: str = "history.jsonl"
    ) -> dict[str, list[Path]]:
        """Return the folders of each row, one a seed; rows without runs are left out.

        Args:
            rows: Which rows; None: all.
            mark: The file that a run must have: `history.jsonl` from the first round on,
                `result.json` when it is finished.
        """
        tables, found = self.tables, {}
        for row in tables["row"] if rows is None else rows:
            seeds = tables["scale"][self.scale]["seeds"]
            paths = [self.folder / folder_name(row, seed) for seed in seeds]
            if paths := [path for path in paths if (path / mark).exists()]:
                found[row] = paths
        if not found:
            raise SystemExit(
                f"{self.folder} has no such runs; start them with papers/suite.py {self.suite}"
            )
        return found


def runs_of(doc: str | None, suite: Path) -> Runs:
    """Return the runs that the command line asks for, of this suite unless it names another."""
    arguments = parser(doc)
    arguments.add_argument("--scale", choices=SCALES, default="mini")
    arguments.add_argument("--suite", type=Path, default=suite, help="results go beside it")
    given = arguments.parse_args()
    return Runs(given.suite, given.scale)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
