"""Levers: ways to take the same training step in fewer bytes.

Each gives bytes for time, and leaves the model whole. All of them act inside `training_step`, so
they are trained, metered and predicted by the same code. What each buys and costs is on
docs/levers.md.
"""

import math
from dataclasses import dataclass
from typing import Literal

from sizewise.errors import ConfigError
from sizewise.steps.recipe import Recipe

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Levers:
    """Which levers a training step uses; by default none.

    Attributes:
        micro_batch: Most samples that run through the model at once: a batch is divided into parts
            of equal size, or nearly, whose gradients add up to that of the batch. None: no parts.
        checkpoint: Keep only the inputs of the model's blocks, and run each block again when its
            backward pass comes.
        blocks: Paths of the modules that `checkpoint` runs twice; a list of modules stands for its
            items. Default: those that `torch_tools.checkpointing` finds.
        step_in_backward: Move each parameter as soon as its gradient is there, and drop that.
        state: Type in which the optimiser keeps its moments; it computes in float32.
        activations: Type in which float32 tensors wait for the backward pass.
    """

    micro_batch: int | None = None
    checkpoint: bool = False
    blocks: tuple[str, ...] = ()
    step_in_backward: bool = False
    state: Precision = "float32"
    activations: Precision = "float32"

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigError(
                f"levers.micro_batch must be at least 1, not {self.micro_batch}; leave it out to "
                "run whole batches"
            )
        if self.blocks and not self.checkpoint:
            raise ConfigError(
                f"levers.blocks names {self.blocks[0]!r}, which only levers.checkpoint uses; set "
                "that to true, or leave them out"
            )

    @property
    def label(self) -> str:
        """What is used, for people, such as "parts of 4, checkpointed"."""
        words = [
            f"parts of {self.micro_batch}" if self.micro_batch else "",
            "checkpointed" if self.checkpoint else "",
            "step in backward" if self.step_in_backward else "",
            "bf16 state" if self.state == "bfloat16" else "",
            "bf16 activations" if self.activations == "bfloat16" else "",
        ]
        return ", ".join(filter(None, words)) or "none"

    def parts(self, batch: int) -> int:
        """Return the number of parts that a batch is divided into."""
        return math.ceil(batch / (self.micro_batch or batch))

    def objection(self, recipe: Recipe, terms: int = 1) -> str | None:
        """Return why a recipe cannot use these levers, in one sentence; None if it can.

        Args:
            recipe: How devices train.
            terms: Number of terms that the loss yields.
        """
        if not self.step_in_backward:
            return None
        alone = "levers.step_in_backward moves a parameter as soon as its gradient is there, but"
        if recipe.precision == "fp16":
            return f"{alone} recipe.precision = 'fp16' looks at all gradients first; use 'bf16'"
        if recipe.sample_clip is not None:
            return f"{alone} recipe.sample_clip adds up those of all samples; leave out one of them"
        if recipe.clip is not None:
            return f"{alone} recipe.clip needs all gradients first; leave out one of them"
        if terms > 1:
            return f"{alone} a loss of {terms} terms adds to it later; leave it out"
        if self.parts(recipe.batch) > 1:
            return f"{alone} levers.micro_batch adds to it later; leave out one of them"
        return None

    def allowed(self, recipe: Recipe, terms: int = 1) -> bool:
        """Return whether a recipe can use these levers, with a loss of so many terms."""
        return self.objection(recipe, terms) is None


NONE = Levers()
"""Plain training."""
