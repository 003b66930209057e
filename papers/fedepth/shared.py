"""What the scripts of this folder share: the way to `common` and `inside`, and their task."""

import sys
from pathlib import Path
from typing import Any

from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

HERE = Path(__file__).parent

# Scripts of a folder are run as files, so the folder above is not on the path by itself.
sys.path.append(str(HERE.resolve().parent))
import common as common  # noqa: E402
import inside as inside  # noqa: E402

MIB = 2**20
"""The paper's MB."""

IMAGE = {"smoke": (3, 8, 8), "mini": (3, 16, 16), "paper": (3, 32, 32)}
BATCH = {"smoke": 4, "mini": 32, "paper": 128}
"""Of the suites: what devices train with at each scale."""

MODEL = {"smoke": "preresnet8", "mini": "preresnet20", "paper": "preresnet20"}


def task(image: tuple[int, int, int], batch: int, model: str = "preresnet20", **args: Any) -> Task:
    """Return a task with the recipe of the suites, for ten classes."""
    recipe = Recipe(momentum=0.9, weight_decay=5e-4, batch=batch, norm="batch")
    return Task(ModelConfig(model, args), recipe, image, classes=10)
