"""Floating-point operations of a training step, counted without running it."""

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sizewise.step import Loss
from sizewise.training import freeze

_SAMPLES = 2  # Batch norm refuses to train on a single value per channel.


def per_sample(
    module: nn.Module, image: tuple[int, int, int], loss: Loss, trainable: tuple[str, ...] | None
) -> int:
    """Return the FLOPs of one training sample, forward and backward.

    Args:
        module: The model; it is not touched.
        image: Shape (C, H, W) of a sample.
        loss: What is minimised.
        trainable: Prefixes of the names of the tensors that learn; None is all of them.
    """
    shadow = copy.deepcopy(module).to("meta").train()
    freeze(shadow, trainable)
    images = torch.empty((_SAMPLES, *image), device="meta")
    labels = torch.empty(_SAMPLES, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        loss(shadow, images, labels).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops()) // _SAMPLES
