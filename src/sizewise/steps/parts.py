"""A batch in parts, and how much the mean loss of each part counts in that of the batch."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sizewise.errors import ConfigError

IGNORED = -100
"""The tag of what has none: padding, and the later pieces of a word."""

Weight = float | Tensor | None
"""The share of a part in its batch; a tensor where only looking at the targets would tell.

None is a batch that is not divided.
"""


def divided(inputs: Any, targets: Any, size: int | None) -> Iterator[tuple[Any, Any, Weight]]:
    """Yield the parts of a batch as views of it, and the share of each in the mean.

    Args:
        inputs: A tensor (B, ...), or a nest of containers of such tensors. One that has another
            length is divided into as many parts, which count by the targets all the same.
        targets: Likewise. Where they are integers, those that are `IGNORED` do not count.
        size: Most samples in a part; None: one part. Parts differ by one sample at most.
    """
    length = _length(targets, inputs) if size is not None else 0
    count = math.ceil(length / size) if size else 1
    if count <= 1:
        yield inputs, targets, None
        return
    counts = isinstance(targets, Tensor) and not targets.is_floating_point()
    total = _counted(targets).clamp(min=1) if counts else None
    for number in range(count):
        cut = partial(_part, number=number, count=count)
        some = tree_map(cut, targets)
        share: float | Tensor
        if total is None:
            share = (_start(number + 1, count, length) - _start(number, count, length)) / length
        else:
            share = _counted(some) / total
        yield tree_map(cut, inputs), some, share


def weighed(term: Tensor, weight: Weight) -> Tensor:
    """Return what the mean loss of a part adds to that of its batch."""
    if weight is None:
        return term
    if isinstance(weight, float):
        return term * weight
    # The mean over no target at all is no number, and must not spoil the others.
    return torch.where(weight > 0, term * weight, 0.0)


def _length(*things: Any) -> int:
    for leaf in tree_leaves(things):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise ConfigError(
        "levers.micro_batch divides batches of tensors, and no tensor came; leave it out"
    )


def _start(number: int, count: int, length: int) -> int:
    # Larger parts first: the first one shows at once whether they fit.
    size, left = divmod(length, count)
    return number * size + min(number, left)


def _part(leaf: Any, number: int, count: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    if len(leaf) < count:
        raise ConfigError(
            f"levers.micro_batch divides a batch into {count} parts, but one of its tensors has "
            f"{len(leaf)} rows; choose larger parts"
        )
    return leaf[_start(number, count, len(leaf)) : _start(number + 1, count, len(leaf))]


def _counted(targets: Tensor) -> Tensor:
    """Return how many targets are not `IGNORED`."""
    return (targets != IGNORED).sum()
