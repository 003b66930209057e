"""What the factories of the zoo share."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from sizewise.errors import ModelError
from sizewise.torch_tools.remaking import clone, remade

Model = TypeVar("Model", bound=nn.Module)


def chain(**modules: nn.Module) -> nn.Sequential:
    """Return modules in sequence, under readable names: `stem.conv`, not `stem.0`."""
    return nn.Sequential(OrderedDict(modules))


def normed(
    inputs: int,
    outputs: int,
    size: int = 3,
    stride: int = 1,
    bias: bool = False,
    **after: nn.Module,
) -> nn.Sequential:
    """Return a convolution that at stride 1 keeps the image's size, a norm, and what follows."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=bias)
    return chain(conv=conv, norm=nn.BatchNorm2d(outputs), **after)


def pooled(
    channels: int, classes: int, rows: int = 1, columns: int = 1, **before: nn.Module
) -> nn.Sequential:
    """Return a head: what comes before, an average pool into rows and columns, a linear layer."""
    return chain(
        **before,
        pool=nn.AdaptiveAvgPool2d((rows, columns)),
        flatten=nn.Flatten(),
        linear=nn.Linear(channels * rows * columns, classes),
    )


def in_stages(
    block: Callable[..., nn.Module],
    inputs: int,
    sizes: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
) -> Iterator[nn.Module]:
    """Yield the blocks of all stages in order; each stage but the first halves the image.

    A block is made from the channels that come in, the sizes of its stage, the last of which is
    what goes out, and its stride. It draws its weights when it is asked for, so a model's weights
    depend on whether that is before or after the head is made.
    """
    for stage, (own, length) in enumerate(zip(sizes, lengths, strict=True)):
        for index in range(length):
            yield block(inputs, *own, 2 if stage > 0 and index == 0 else 1)
            inputs = own[-1]


class Shortcut(nn.Module):
    """A block that adds what comes in, projected where the shape changes, before a last ReLU."""

    projection: nn.Module | None
    relu: nn.Module

    def joined(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ReLU(residual + x)."""
        shortcut = x if self.projection is None else self.projection(x)
        out: Tensor = self.relu(residual + shortcut)
        return out

    def dropped(self) -> nn.Module:
        """Return what is left without the convolutions; what comes in is not negative already."""
        if self.projection is None:
            return nn.Identity()
        return chain(projection=self.projection, relu=self.relu)


def repeats(family: str, depth: int, extra: int) -> int:
    """Return n for a CIFAR network of depth 6n + extra, whose three stages have equal length.

    The depth counts layers with weights, except projections; `extra` are outside the stages.

    Raises:
        ModelError: No n >= 1 gives this depth.
    """
    n, rest = divmod(depth - extra, 6)
    if n < 1 or rest:
        below = 6 * max(n, 1) + extra
        raise ModelError(
            f"the depth of a {family} is 6n + {extra}, and {depth} came; "
            f"use {family}{below} or {family}{below + 6}"
        )
    return n


def initialise_convolutions(model: Model) -> Model:
    """Draw every convolution's weights as He et al. (2015) do for ReLU networks."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def check_output(model: nn.Module, inputs: Tensor, expected: tuple[int, ...]) -> None:
    """Make sure that a model gives one logit per class; nothing is changed.

    The inputs are two samples, (2, C, H, W) or (2, T), so that a stray squeeze() of the batch
    dimension shows; outputs have the shape (2, classes), or for tags (2, T, classes).

    Raises:
        ModelError: It fails on such samples, or gives something else.
    """
    sample = tuple(inputs.shape[1:])
    # A copy in eval mode: whatever its forward writes (norm statistics, caches) stays behind.
    try:
        probe = remade(model, clone).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits: object = probe(inputs)
    except Exception as error:  # a model of the user's may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        what = "images" if len(sample) == 3 else "texts"
        raise ModelError(
            f"{type(model).__name__} cannot run on {what} of shape {sample}: {reason}"
        ) from error
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{type(model).__name__} gives a {type(logits).__name__}, not a tensor of logits; "
            "wrap it in a module whose forward returns the logits"
        )
    if logits.ndim == len(expected) and logits.shape[-1] != expected[-1]:
        raise ModelError(
            f"{type(model).__name__} gives {logits.shape[-1]} outputs for {expected[-1]} classes; "
            "give its last layer one output per class"
        )
    if logits.shape != expected:
        raise ModelError(
            f"{type(model).__name__} gives shape {tuple(logits.shape)} for a batch of 2 samples; "
            f"expected {expected}: logits per sample and class"
        )
