"""What fits a budget: the largest of several choices, and the longest runs of blocks.

Both ask a cost function that says how many bytes a choice needs, such as the peak that
`memory.predict` gives, or one of the papers' accountings.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sizewise.errors import BudgetTooSmall

T = TypeVar("T")


@dataclass(frozen=True)
class Packing:
    """A model's blocks, decomposed into stages that fit a budget.

    Attributes:
        stages: Runs of consecutive blocks, in order.
        skipped: Blocks that do not fit even alone.
    """

    stages: tuple[range, ...]
    skipped: tuple[int, ...]


def pack_blocks(
    cost: Callable[[int, int], float], blocks: int, budget: float, tolerance: float = 0.0
) -> Packing:
    """Decompose a model from its input side: each stage takes as many blocks as still fit.

    Args:
        cost: Bytes of training blocks start, ..., stop - 1 as one stage, called as
            cost(start, stop).
        blocks: Number of blocks.
        budget: Bytes of the device.
        tolerance: Share of the budget by which a stage may exceed it. FeDepth's decompositions come
            out with 5 % of its own accounting; a device that must not exceed its bytes has none.

    Raises:
        BudgetTooSmall: No block fits.
    """
    limit = budget * (1 + tolerance)
    stages: list[range] = []
    skipped: list[int] = []
    start = 0
    while start < blocks:
        stop = start
        while stop < blocks and cost(start, stop + 1) <= limit:
            stop += 1
        if stop > start:
            stages.append(range(start, stop))
        else:
            skipped.append(start)
            stop += 1
        start = stop
    if not stages:
        needed = min(cost(block, block + 1) for block in range(blocks)) / (1 + tolerance)
        raise BudgetTooSmall(int(budget), math.ceil(needed), "training the cheapest block")
    return Packing(tuple(stages), tuple(skipped))


GUESSES = 5
"""How often a search goes by where the costs seem to lead before it halves what is left."""


def largest_fitting(
    choices: Sequence[T],
    cost: Callable[[T], float],
    budget: float | None,
    *,
    ascending: bool = True,
    evenly: bool = False,
) -> T | None:
    """Return the last choice that fits a budget; None if none does.

    Args:
        choices: In ascending order of what people want; at least one.
        cost: Bytes of a choice.
        budget: Bytes of the device; None is unlimited.
        ascending: Whether costs never fall along the choices, so that few of them are asked for:
            the last one first, which fits more often than not. Else the last ones are, one by one.
        evenly: Whether they grow about evenly, so that it pays to look where two of them point to.
    """
    if budget is None:
        return choices[-1]
    if not ascending:
        return next((choice for choice in reversed(choices) if cost(choice) <= budget), None)
    low, high = -1, len(choices) - 1
    before, last = (-1, 0.0), (high, cost(choices[high]))
    if last[1] <= budget:
        return choices[high]
    guesses = 0
    while high - low > 1:
        slope = (last[1] - before[1]) / (last[0] - before[0])
        guess = (low + high) // 2
        if evenly and slope > 0 and guesses < GUESSES:
            guess = math.floor(last[0] + (budget - last[1]) / slope)
        guess = min(max(guess, low + 1), high - 1)
        before, last = last, (guess, cost(choices[guess]))
        low, high = (guess, high) if last[1] <= budget else (low, guess)
        guesses += 1
    return choices[low] if low >= 0 else None
