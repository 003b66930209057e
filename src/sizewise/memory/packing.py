"""What fits a budget: the largest of several choices, and the longest runs of blocks.

Both ask a cost function that says how many bytes a choice needs, such as the peak that
`memory.predict` gives, or one of the papers' accountings.
"""

import math
from bisect import bisect_right
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


def largest_fitting(
    choices: Sequence[T],
    cost: Callable[[T], float],
    budget: float | None,
    *,
    ascending: bool = True,
) -> T | None:
    """Return the last choice that fits a budget; None if none does.

    Args:
        choices: In ascending order of what people want; at least one.
        cost: Bytes of a choice.
        budget: Bytes of the device; None is unlimited.
        ascending: Whether costs never fall along the choices, so that log2 of them are asked for,
            the last one first: more often than not it fits. Else the last ones are, one by one.
    """
    if budget is None or cost(choices[-1]) <= budget:
        return choices[-1]
    if not ascending:
        return next((choice for choice in reversed(choices[:-1]) if cost(choice) <= budget), None)
    fitting = bisect_right(choices[:-1], budget, key=cost)
    return choices[fitting - 1] if fitting else None
