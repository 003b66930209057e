"""What the scripts of this folder share: their argument, their task, and how a figure is saved."""

import sys
from pathlib import Path
from typing import Any

from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

HERE = Path(__file__).parent

# Scripts of a folder are run as files, so the folder above is not on the path by itself.
sys.path.append(str(HERE.parent))
from common import COLOURS, save, scale, write  # noqa: E402

__all__ = ["BATCH", "COLOURS", "HERE", "IMAGE", "MIB", "save", "scale", "task", "write"]
MIB = 2**20
"""The paper's MB."""

IMAGE = {"mini": (3, 16, 16), "paper": (3, 32, 32)}
BATCH = {"mini": 32, "paper": 128}
"""Of the suites: what devices train with at each scale."""


def task(image: tuple[int, int, int], batch: int, model: str = "preresnet20", **args: Any) -> Task:
    """Return a task with the recipe of the suites, for ten classes."""
    recipe = Recipe(momentum=0.9, weight_decay=5e-4, batch=batch, norm="batch")
    return Task(ModelConfig(model, args), recipe, image, classes=10)
