"""Floating-point operations of a training step, counted without running it."""

import copy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sizewise.step import Loss, backpropagate
from sizewise.training import freeze

SAMPLES = 2  # Batch norm refuses to train on a single value per channel.


def per_sample(
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    trainable: tuple[str, ...] | None = None,
) -> int:
    """Return the FLOPs of one training sample, forward and backward.

    Args:
        module: The model; it is not touched.
        inputs: A few samples, e.g. (B, C, H, W); only their shape and type matter.
        targets: Their labels, likewise.
        loss: What is minimised.
        trainable: Prefixes of the names of the tensors that learn; None is all of them.
    """
    try:
        return _count(copy.deepcopy(module).to("meta"), inputs, targets, loss, trainable)
    except Exception:
        # The model looks at its data: give it some.
        inputs, targets = (torch.ones_like(part, device="cpu") for part in (inputs, targets))
        return _count(copy.deepcopy(module), inputs, targets, loss, trainable)


def _count(
    twin: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    trainable: tuple[str, ...] | None,
) -> int:
    freeze(twin.train(), trainable)
    with FlopCounterMode(display=False) as counter:
        backpropagate(loss(twin, inputs, targets))
    return int(counter.get_total_flops()) // len(inputs)
