"""Which levers a device uses: the cheapest combination that fits its bytes.

Combinations are tried in the order of what they cost. First those that need no further operations:
none; the optimiser's step in the backward pass; parts of a batch, the fewest first; then the same
with moments and activations in bfloat16, which rounds; and last all of that with checkpoints, which
run the forward pass twice. What each buys and changes is on docs/levers.md.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import dropwhile, groupby, product

from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.plan import Submodel, TrainingStage, Work
from sizewise.memory.packing import largest_fitting
from sizewise.steps.levers import NONE, Levers, Precision
from sizewise.steps.recipe import Lever, Recipe
from sizewise.surgery import norms
from sizewise.training.task import Task

SMALLEST_PART = 4
"""Samples in a part of a batch, where batch norm takes its statistics from them: of fewer they are
mostly noise."""

EVERY: tuple[Lever, ...] = (
    "microbatch",
    "checkpoint",
    "step_in_backward",
    "bf16_state",
    "bf16_activations",
)

UNUSABLE = (ConfigError, ModelError)
"""Raised by levers that a loss or a model cannot be trained with; those are passed over."""


class LeverChoice:
    """Chooses levers for the steps of one method.

    Args:
        task: What is trained, and how; its recipe names the levers.
        peak: From a submodel and a stage to the predicted bytes of a step.
        divides: Whether a loss can be computed over parts of a batch at all.
    """

    def __init__(
        self, task: Task, peak: Callable[[Submodel, TrainingStage], int], *, divides: bool
    ) -> None:
        self.task, self._peak, self._divides = task, peak, divides
        self._unusable: set[tuple[Work, Levers]] = set()

    @cached_property
    def choices(self) -> tuple[Levers, ...]:
        """All combinations, cheapest first; without any lever, the plain step alone."""
        recipe = self.task.recipe
        if recipe.levers == ("none",):
            return (NONE,)
        smallest = SMALLEST_PART if norms.has_batch_norm(self.task.build()) else 1
        return combinations(recipe, smallest, divides=self._divides)

    def least(self, submodel: Submodel, stage: TrainingStage | None = None) -> int:
        """Return the fewest bytes that a step can be taken in; default: of all of a submodel."""
        return self.least_with(lambda one: self._peak(submodel, one), stage or self.task.stage())

    def least_with(self, peak: Callable[[TrainingStage], int], stage: TrainingStage) -> int:
        """Return the fewest bytes that a stage needs, given how bytes follow from its levers."""
        found = [peak(stage)]
        for levers in most_frugal(self.choices):
            # A loss of several terms, or a model without blocks, can do without some of them.
            for usable in dict.fromkeys(less_demanding(levers)):
                if (least := self._bytes(peak, replace(stage, levers=usable))) < math.inf:
                    found.append(int(least))
                    break
        return min(found)

    def cheapest(
        self, submodel: Submodel, stage: TrainingStage, budget: int | None
    ) -> TrainingStage:
        """Return a stage with the cheapest levers that fit a budget; as it is if none do."""
        if budget is None or self._peak(submodel, stage) <= budget:
            return stage

        def bytes_of(levers: Levers) -> float:
            return self._bytes(partial(self._peak, submodel), replace(stage, levers=levers))

        for _, group in groupby(self.choices[1:], key=_but_for_parts):
            alike = list(dropwhile(lambda one: bytes_of(one) == math.inf, [*group][::-1]))
            # Smaller parts never need more: if the smallest do not fit, no others do.
            if alike and bytes_of(alike[0]) <= budget:
                return replace(stage, levers=largest_fitting(alike, bytes_of, budget) or NONE)
        return stage

    def _bytes(self, peak: Callable[[TrainingStage], int], stage: TrainingStage) -> float:
        """Return the bytes of a stage, infinitely many if its levers cannot be used.

        That is found out once for each kind of work: a loss or a model that refuses them does so at
        every width.
        """
        key = stage.work, stage.levers
        if key not in self._unusable:
            with suppress(*UNUSABLE):
                return peak(stage)
            self._unusable.add(key)
        return math.inf


def combinations(recipe: Recipe, smallest_part: int, *, divides: bool) -> tuple[Levers, ...]:
    """Return the combinations of levers that a recipe allows, cheapest first.

    Args:
        recipe: How devices train; it names the levers.
        smallest_part: Fewest samples that may run through the model at once.
        divides: Whether a loss can be computed over parts of a batch at all.
    """
    named = set(EVERY if recipe.levers == ("auto",) else recipe.levers)
    stateful = recipe.optimizer != "sgd" or recipe.momentum > 0
    # Where gradients are clipped sample by sample, parts are as small as can be.
    parts = "microbatch" in named and divides and recipe.sample_clip is None
    sizes = list(_sizes(recipe.batch, smallest_part)) if parts else []
    kinds: list[Precision] = ["float32", "bfloat16"]
    found = [
        Levers(size, checkpoint, (), moved, state, activations)
        for checkpoint, activations, state, (size, moved) in product(
            [False, True] if "checkpoint" in named else [False],
            kinds if "bf16_activations" in named else kinds[:1],
            kinds if "bf16_state" in named and stateful else kinds[:1],
            [(None, False), (None, True), *((size, False) for size in sizes)],
        )
        if not moved or "step_in_backward" in named
    ]
    return tuple(levers for levers in found if levers.allowed(recipe))


def _but_for_parts(levers: Levers) -> tuple[bool, Levers]:
    """Return what combinations have in common that differ only in the size of parts."""
    return levers.micro_batch is None, replace(levers, micro_batch=None)


def _sizes(batch: int, smallest: int) -> Iterator[int]:
    """Yield the sizes of the largest of 2, 4, 8, ... parts of a batch."""
    count = 2
    while batch // count >= max(smallest, 1):
        yield -(-batch // count)
        count *= 2


def most_frugal(choices: tuple[Levers, ...]) -> tuple[Levers, ...]:
    """Return the combinations of which one needs the fewest bytes, or nearly: they stand for all.

    These are all levers at once, without parts and with the smallest, and with moments of either
    type: to turn those of a large embedding into float32 takes more than they save.
    """
    last = {(levers.micro_batch is None, levers.state): levers for levers in choices}
    return tuple(levers for levers in last.values() if levers != NONE)


def less_demanding(levers: Levers) -> Iterator[Levers]:
    """Yield a combination, then what is left of it where a lever cannot be used."""
    for checkpoint, moved in product((levers.checkpoint, False), (levers.step_in_backward, False)):
        yield replace(levers, checkpoint=checkpoint, step_in_backward=moved)
