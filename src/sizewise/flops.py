"""Floating-point operations of a training step, counted without running it."""

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sizewise.step import Loss, backpropagate
from sizewise.training import freeze

_SAMPLES = 2  # Batch norm refuses to train on a single value per channel.


def per_sample(
    module: nn.Module, shape: tuple[int, ...], loss: Loss, trainable: tuple[str, ...] | None
) -> int:
    """Return the FLOPs of one training sample, forward and backward.

    Args:
        module: The model; it is not touched.
        shape: Shape of a sample, e.g. (C, H, W).
        loss: What is minimised.
        trainable: Prefixes of the names of the tensors that learn; None is all of them.
    """
    try:
        return _count(copy.deepcopy(module).to("meta"), shape, loss, trainable, "meta")
    except Exception:
        # The model looks at its data: give it some.
        return _count(copy.deepcopy(module), shape, loss, trainable, "cpu")


def _count(
    twin: nn.Module,
    shape: tuple[int, ...],
    loss: Loss,
    trainable: tuple[str, ...] | None,
    device: str,
) -> int:
    freeze(twin.train(), trainable)
    images = torch.zeros((_SAMPLES, *shape), device=device)
    labels = torch.zeros(_SAMPLES, dtype=torch.int64, device=device)
    with FlopCounterMode(display=False) as counter:
        backpropagate(loss(twin, images, labels))
    return int(counter.get_total_flops()) // _SAMPLES
