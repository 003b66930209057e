"""Which levers a device uses: the cheapest combination that fits its bytes.

Combinations are tried in the order of what they cost. First those that need no further operations:
none; the optimiser's step in the backward pass; parts of a batch, the fewest first; then the same
with moments and activations in bfloat16, which rounds; and last all of that with checkpoints, which
run the forward pass twice. What each buys and changes is on docs/levers.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from sizewise.steps.levers import NONE, Levers, Precision
from sizewise.steps.recipe import Lever, Recipe

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


def combinations(recipe: Recipe, smallest_part: int, *, divides: bool) -> tuple[Levers, ...]:
    """Return the combinations of levers that a recipe allows, cheapest first.

    Args:
        recipe: How devices train; it names the levers.
        smallest_part: Fewest samples that may run through the model at once.
        divides: Whether a loss can be computed over parts of a batch at all.
    """
    if recipe.levers == ("none",):
        return (NONE,)
    named = set(EVERY if recipe.levers == ("auto",) else recipe.levers)
    stateful = recipe.optimizer != "sgd" or recipe.momentum > 0
    sizes = list(_sizes(recipe.batch, smallest_part)) if "microbatch" in named and divides else []
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
