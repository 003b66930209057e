"""What is fixed for a whole run and the same on the server, in every worker and on every device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sizewise import models, norms, rng
from sizewise.recipe import Recipe


@dataclass(frozen=True)
class ModelConfig:
    """The `[model]` table.

    Attributes:
        name: A model of the zoo, or "package.module:factory" for your own.
        args: Further arguments of its factory.
    """

    name: str = "preresnet20"
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """The model, the recipe and the shape of the data.

    Attributes:
        model: Which model to build.
        recipe: How to train it.
        image: Shape of one image: (channels, height, width).
        classes: Number of classes.
        seed: The run's seed.
        rounds: Length of the run.
        enforce: Meter every training step, not only the first ones of each kind of work.
    """

    model: ModelConfig
    recipe: Recipe
    image: tuple[int, int, int]
    classes: int
    seed: int = 0
    rounds: int = 1
    enforce: bool = False

    def build(self, width: float = 1.0) -> nn.Module:
        """Build the model at a width ratio, with fresh weights that depend on the seed alone."""
        with rng.seeded(self.seed, "model", str(width)):
            module = models.build(
                self.model.name,
                classes=self.classes,
                image=self.image,
                width=width,
                args=self.model.args,
            )
        return norms.prepare(module, self.recipe.norm)
