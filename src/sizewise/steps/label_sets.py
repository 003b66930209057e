"""Several label sets in one model: a head for each, of which a sample concerns one.

Label s * C + c is class c of set s, where every set has C places. A model for S sets gives outputs
(..., S, C); a sample is compared with the head of its own set only, so the others do not learn from
it. With one set outputs are (..., C) as ever.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def own_head(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of each target's own set, and the targets as classes within it.

    Args:
        outputs: (B, S, C), or for tags (B, T, S, C).
        targets: int64 (B,), or (B, T); below 0: none.

    Returns:
        Outputs (B, C) or (B * T, C), and targets (B,) or (B * T,).
    """
    flat = targets.flatten()
    places = outputs.shape[-1]
    own = outputs.flatten(0, -3)[
        torch.arange(len(flat), device=flat.device), flat.clamp(min=0) // places
    ]
    return own, torch.where(flat < 0, flat, flat % places)


def divide(outputs: Tensor, targets: Tensor, sets: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the samples of each set: outputs of its head, and targets as classes within it.

    Args:
        outputs: (B, S, C), or for tags (B, T, S, C); with one set without the S.
        targets: int64 (B,), or (B, T).
        sets: S.
    """
    if sets == 1:
        yield outputs, targets
        return
    places = outputs.shape[-1]
    # A text's set is that of its tags, all of which are in one.
    owner = targets.flatten(1).amax(1) // places if targets.ndim > 1 else targets // places
    for number in range(sets):
        mine = owner == number
        labels = targets[mine]
        yield (
            outputs[mine].select(-2, number),
            torch.where(labels < 0, labels, labels - number * places),
        )
