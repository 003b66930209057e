"""What the scripts of this folder share: their argument, their tasks, and how a table is saved."""

import argparse
from pathlib import Path

from sizewise.recipe import Recipe
from sizewise.task import ModelConfig, Task

HERE = Path(__file__).parent

BATCH = 32

DATA = {
    "resnet20": (32, 10),
    "densenet40": (32, 100),
    "resnet44": (64, 200),
    "resnet56": (64, 1000),
}
"""The side of an image and the classes that the paper trains each model on."""


def scale(doc: str | None, default: str) -> str:
    """Return the scale that the command line asks for."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--scale", choices=("mini", "paper"), default=default)
    chosen: str = parser.parse_args().scale
    return chosen


def task(model: str, scale: str, *ratios: float) -> Task:
    """Return a task with the recipe of the suites; at mini scale images have half the side."""
    side, classes = DATA[model]
    side = side // 2 if scale == "mini" else side
    recipe = Recipe(momentum=0.9, weight_decay=1e-3, batch=BATCH, norm="batch")
    return Task(ModelConfig(model), recipe, (3, side, side), classes, rounds=2500, ratios=ratios)


def write(lines: list[str], path: Path) -> None:
    """Write Markdown, show it, and say where it is."""
    text = "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text)
    print(path)
