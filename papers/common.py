"""What the scripts of all papers share: their argument, and how a table or a figure is saved."""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

# Paul Tol's colour-blind safe colours, as in `sizewise.report.figures`.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def scale(doc: str | None, default: str) -> str:
    """Return the scale that the command line asks for."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--scale", choices=("mini", "paper"), default=default)
    chosen: str = parser.parse_args().scale
    return chosen


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
