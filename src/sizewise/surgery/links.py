"""Links: a hidden tensor made to fit where another shape is expected, without weights."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F


def skip_link(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Fit a hidden tensor to what expects another shape, without weights.

    Feature maps are sub-sampled by plain striding, and zeros are put on both sides of the channels.
    Where there are too many channels, the first ones are kept; where striding does not give all the
    pixels that are expected, zeros follow. Tokens (T, C) are a map of one row, channels last. What
    has another number of dimensions is a row of numbers, cut or padded.

    Args:
        x: Hidden tensor (B, c, h, w), (B, h, w, c), (B, t, c), (B, c), or any of the right shape.
        shape: Shape of one sample that is expected.
    """
    own = x.shape[1:]
    if own == torch.Size(shape):
        return x
    if len(shape) == 1 and len(own) == 1:
        missing = shape[0] - x.shape[1]
        return F.pad(x, (missing // 2, missing - missing // 2)) if missing > 0 else x[:, : shape[0]]
    if len(shape) == 2 and len(own) == 2:
        tokens = skip_link(x.transpose(1, 2).unsqueeze(2), (shape[1], 1, shape[0]))
        return tokens.squeeze(2).transpose(1, 2)
    if len(shape) == 3 and len(own) == 3:
        if channels_last(own, shape):
            moved = skip_link(x.movedim(-1, 1), (shape[2], *shape[:2]))
            return moved.movedim(1, -1)
        return _map(x, shape)
    return skip_link(x.flatten(1), (prod(shape),)).reshape(-1, *shape)


def _map(x: Tensor, shape: Sequence[int]) -> Tensor:
    channels, height, width = shape
    down, across = strides(x.shape[1:], shape)
    x = x[:, :channels, ::down, ::across]
    missing = channels - x.shape[1]
    below, right = height - x.shape[2], width - x.shape[3]
    return F.pad(x, (0, right, 0, below, missing // 2, missing - missing // 2))


def channels_last(shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether maps are (H, W, C): on the way, there are fewer pixels and more channels."""
    return shape[0] > expected[0] and shape[-1] < expected[-1]


def strides(shape: Sequence[int], expected: Sequence[int]) -> tuple[int, int]:
    """Return the steps, down and across, that lead from a feature map (C, H, W) to a smaller one.

    Rounded up, as layers with a stride of 2 are: 30 pixels become 15, then 8, in steps of 4.
    """
    return -(-shape[1] // expected[1]), -(-shape[2] // expected[2])
