"""Channels last: images whose channels lie side by side in memory, which many kernels like better.

Only the weights of convolutions are laid out anew; torch then computes, and returns, images in the
same layout. What depends on the layout is the order of sums, so the last bits differ.

torch 2.13 gives wrong results on CPUs for 1x1 convolutions with a stride, of 2 to 7 input channels.
Those get their images channels first, and so does every convolution that computes something else on
this machine. A model that computes something else for another reason is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.errors import ConfigError
from sizewise.torch_tools.remaking import clone, remade

Layout = Literal["contiguous", "channels_last", "auto"]

LARGEST = 2**20
"""Most weights of one convolution for which `auto` lays out channels last.

Kernels copy the weights of a wide convolution into their own order in every step; its maps are
small, so that this takes more time than the layout of images saves (see docs/accelerators.md).
"""

_WRONG = range(2, 8)
_TOLERANCE = 1e-3

Kind = tuple[Any, ...]
"""What tells convolutions apart: channels, kernel, stride and the like."""


@dataclass(frozen=True)
class Arrangement:
    """How the images of a model lie in memory.

    Attributes:
        channels_last: Whether most of them have their channels side by side.
        first: Convolutions that get their images channels first all the same.
    """

    channels_last: bool = False
    first: frozenset[Kind] = frozenset()


def arranged(module: nn.Module, inputs: Tensor, layout: Layout) -> Arrangement:
    """Return how a model's images should lie, by its layers alone: a timing would not repeat.

    Args:
        module: As it was built; it is left alone.
        inputs: A few samples.
        layout: What the user asks for; `auto` is channels last where that is as fast or faster, and
            right.

    Raises:
        ConfigError: The model computes something else in the layout that was asked for.
    """
    weights = [layer.weight.numel() for layer in _convolutions(module)]
    if layout == "contiguous" or not weights or (layout == "auto" and max(weights) > LARGEST):
        return Arrangement()
    found = Arrangement(True, frozenset(_differing(module, inputs)))
    expected = _gradients(remade(module, clone), inputs)
    name = _first_difference(expected, _gradients(laid_out(remade(module, clone), found), inputs))
    if name is None:
        return found
    if layout == "auto":
        return Arrangement()
    raise ConfigError(
        f"engine.layout = {layout!r} changes what the model computes, first seen in the "
        f"gradient of {name!r}, by an error of torch on this CPU; leave it out"
    )


def laid_out(module: nn.Module, arrangement: Arrangement) -> nn.Module:
    """Return a model with its convolutions arranged; it is changed in place."""
    if not arrangement.channels_last:
        return module
    for layer in _convolutions(module):
        if _kind(layer) in arrangement.first:
            layer.register_forward_pre_hook(_channels_first)
        elif _pointwise(layer):
            layer.register_forward_pre_hook(_channels_first_if_narrow)
        else:
            # The parameter itself stays, as it may be tied to others.
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return module


def _convolutions(module: nn.Module) -> Iterator[nn.Conv2d]:
    for layer in module.modules():
        # A weight may be computed from others, or not be there yet.
        if isinstance(layer, nn.Conv2d) and type(layer.weight) is nn.Parameter:
            yield layer


def _kind(layer: nn.Conv2d) -> Kind:
    shape = tuple(layer.weight.shape), layer.kernel_size, layer.stride, layer.padding
    return (type(layer), *shape, layer.dilation, layer.groups)


def _pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.stride != (1, 1)


def _channels_first(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    images, *others = inputs
    return (images.contiguous(), *others)


def _channels_first_if_narrow(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # Looked at as it runs: a narrower model may run in the layers of a wide one.
    return _channels_first(layer, inputs) if inputs[0].shape[1] in _WRONG else inputs


def _differing(module: nn.Module, inputs: Tensor) -> Iterator[Kind]:
    """Yield the convolutions of a model that compute something else channels last."""
    for layer, shape in _as_they_run(module, inputs):
        images = torch.linspace(-1, 1, shape.numel()).view(shape)
        last = images.contiguous(memory_format=torch.channels_last)
        expected = _gradients(remade(layer, clone), images.requires_grad_())
        found = _gradients(laid_out(remade(layer, clone), Arrangement(True)), last.requires_grad_())
        if _first_difference(expected, found) is not None:
            yield _kind(layer)


def _as_they_run(module: nn.Module, inputs: Tensor) -> list[tuple[nn.Conv2d, torch.Size]]:
    """Return one of each kind of convolution, with the shape of the images that it gets."""
    seen: dict[tuple[Kind, torch.Size], nn.Conv2d] = {}

    def notice(layer: nn.Conv2d, given: tuple[Tensor, ...]) -> None:
        seen.setdefault((_kind(layer), given[0].shape), layer)

    twin = remade(module, clone).eval()
    handles = [layer.register_forward_pre_hook(notice) for layer in _convolutions(twin)]
    with torch.no_grad():
        twin(inputs)
    for handle in handles:
        handle.remove()
    return [(layer, shape) for (_, shape), layer in seen.items()]


Gradients = Sequence[tuple[str, Tensor]]


def _gradients(module: nn.Module, inputs: Tensor) -> Gradients:
    """Return what a model makes of some inputs, and the gradients, by name."""
    module.eval()  # Batch norm would make much of small differences, dropout draws.
    outputs = module(inputs).float().flatten(1)
    weights = torch.linspace(0.5, 1.5, outputs[0].numel())
    F.softplus(outputs).mul(weights).sum().backward()  # type: ignore[no-untyped-call]
    named = [("inputs", inputs), *module.named_parameters()]
    return [("output", outputs.detach()), *((n, p.grad) for n, p in named if p.grad is not None)]


def _first_difference(expected: Gradients, found: Gradients) -> str | None:
    """Return the name of the first that differs by more than rounding, if any does."""
    for (name, one), (_, other) in zip(expected, found, strict=True):
        scale = float(one.abs().max()) or 1.0
        if not float((one - other).abs().max()) <= _TOLERANCE * scale:
            return name
    return None
