"""Channels last: images whose channels lie side by side in memory, which many kernels like better.

Only the weights of convolutions are laid out anew; torch then computes, and returns, images in the
same layout. What depends on the layout is the order of sums, so the last bits differ.

torch 2.13 gives wrong results on CPUs for 1x1 convolutions with a stride, of 2 to 7 input channels.
Those get their images channels first. A model that computes something else than before, for
whatever reason, is refused (`check`).
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.errors import ConfigError
from sizewise.torch_tools.remaking import clone, remade

Layout = Literal["contiguous", "channels_last"]

_WRONG = range(2, 8)
_TOLERANCE = 1e-3


def laid_out(module: nn.Module, layout: Layout) -> nn.Module:
    """Return a model with its convolutions in a layout; it is changed in place."""
    if layout == "contiguous":
        return module
    for layer in module.modules():
        if not isinstance(layer, nn.Conv2d):
            continue
        if _pointwise(layer):
            layer.register_forward_pre_hook(_channels_first)
        elif layer.weight is not None and not isinstance(layer.weight, nn.UninitializedParameter):
            # The parameter itself stays, as it may be tied to others.
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return module


def _pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.stride != (1, 1)


def _channels_first(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # Looked at as it runs: a narrower model may run in the layers of a wide one.
    images, *others = inputs
    return (images.contiguous() if images.shape[1] in _WRONG else images, *others)


def check(module: nn.Module, inputs: Tensor, layout: Layout) -> None:
    """Raise ConfigError if a model computes something else in a layout.

    Args:
        module: As it was built, in evaluation mode or not; it is left alone.
        inputs: A few samples.
        layout: The one to try.
    """
    if layout == "contiguous" or not any(isinstance(m, nn.Conv2d) for m in module.modules()):
        return
    expected = _gradients(remade(module, clone), inputs)
    found = _gradients(laid_out(remade(module, clone), layout), inputs)
    for (name, one), (_, other) in zip(expected, found, strict=True):
        scale = float(one.abs().max()) or 1.0
        if not float((one - other).abs().max()) <= _TOLERANCE * scale:
            raise ConfigError(
                f"engine.layout = {layout!r} changes what the model computes, first seen in the "
                f"gradient of {name!r}, by an error of torch on this CPU; leave it out"
            )


def _gradients(module: nn.Module, inputs: Tensor) -> Sequence[tuple[str, Tensor]]:
    module.eval()  # Batch norm would make much of small differences, dropout draws.
    outputs = module(inputs).float().flatten(1)
    weights = torch.linspace(0.5, 1.5, outputs[0].numel())
    F.softplus(outputs).mul(weights).sum().backward()  # type: ignore[no-untyped-call]
    named = module.named_parameters()
    return [("output", outputs.detach()), *((n, p.grad) for n, p in named if p.grad is not None)]
