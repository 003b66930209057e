"""Floating-point operations of a training step, counted without running it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import flop_registry

from sizewise.dispatch import DispatchMode
from sizewise.hollow import HollowMode, clone, emptied, remade
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
        with HollowMode():
            twin = remade(module, emptied)
            return _count(twin, emptied(inputs), emptied(targets), loss, trainable)
    except Exception:
        # The model looks at its data: give it some.
        inputs, targets = (torch.ones_like(part, device="cpu") for part in (inputs, targets))
        twin = remade(module, clone)
        return _count(twin, inputs, targets, loss, trainable)


def _count(
    twin: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    trainable: tuple[str, ...] | None,
) -> int:
    freeze(twin.train(), trainable)
    # Attention as products of matrices, which the formulas know; a fused kernel does the same work.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH), _Counter() as counter:
        backpropagate(loss(twin, inputs, targets))
    return counter.total // len(inputs)


class _Counter(DispatchMode):
    """Adds up what torch's formulas say; its own counter also keeps a table by layers."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and add what it costs."""
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out
