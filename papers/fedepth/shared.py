"""What the scripts of this folder share: their argument, their task, and how a figure is saved."""

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from sizewise.recipe import Recipe
from sizewise.task import ModelConfig, Task

HERE = Path(__file__).parent
MIB = 2**20
"""The paper's MB."""

# Paul Tol's colour-blind safe colours, as in `sizewise.report.figures`.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")

IMAGE = {"mini": (3, 16, 16), "paper": (3, 32, 32)}
BATCH = {"mini": 32, "paper": 128}
"""Of the suites: what devices train with at each scale."""


def scale(doc: str | None, default: str) -> str:
    """Return the scale that the command line asks for."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--scale", choices=("mini", "paper"), default=default)
    chosen: str = parser.parse_args().scale
    return chosen


def task(image: tuple[int, int, int], batch: int, model: str = "preresnet20", **args: Any) -> Task:
    """Return a task with the recipe of the suites, for ten classes."""
    recipe = Recipe(momentum=0.9, weight_decay=5e-4, batch=batch, norm="batch")
    return Task(ModelConfig(model, args), recipe, image, classes=10)


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
