"""What the scripts of this folder share: the way to `common` and `inside`, and their tasks."""

import sys
from pathlib import Path

from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

HERE = Path(__file__).parent

# Scripts of a folder are run as files, so the folder above is not on the path by itself.
sys.path.append(str(HERE.resolve().parent))
import common as common  # noqa: E402
import inside as inside  # noqa: E402

BATCH = 32

DATA = {
    "resnet20": (32, 10),
    "densenet40": (32, 100),
    "resnet44": (64, 200),
    "resnet56": (64, 1000),
}
"""The side of an image and the classes that the paper trains each model on."""


def task(model: str, scale: str, *ratios: float) -> Task:
    """Return a task with the recipe of the suites; at mini scale images have half the side.

    In a smoke run they have a quarter, and every model is ResNet-8.
    """
    side, classes = DATA[model]
    side //= {common.SMOKE: 4, "mini": 2}.get(scale, 1)
    model = "resnet8" if scale == common.SMOKE else model
    recipe = Recipe(momentum=0.9, weight_decay=1e-3, batch=BATCH, norm="batch")
    return Task(ModelConfig(model), recipe, (3, side, side), classes, rounds=2500, ratios=ratios)
