"""What the factories of the zoo share."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from sizewise.errors import ModelError
from sizewise.torch_tools.remaking import clone, remade


def chain(**modules: nn.Module) -> nn.Sequential:
    """Return modules in sequence, under readable names: `stem.conv`, not `stem.0`."""
    return nn.Sequential(OrderedDict(modules))


def repeats(family: str, depth: int, extra: int) -> int:
    """Return n for a CIFAR network of depth 6n + extra, whose three stages have equal length.

    Args:
        family: The name before the depth, for the error.
        depth: Layers with weights, projections not counted.
        extra: Layers outside the stages.

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


def initialise_convolutions(model: nn.Module) -> None:
    """Draw every convolution's weights as He et al. (2015) do for ReLU networks."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def check_output(model: nn.Module, inputs: Tensor, expected: tuple[int, ...]) -> None:
    """Make sure that a model gives one logit per class.

    Args:
        model: Any module; neither it nor the global random state is changed.
        inputs: Two samples, (2, C, H, W) or (2, T): so that a stray squeeze() of the batch
            dimension shows.
        expected: Shape of its outputs: (2, classes), or for tags (2, T, classes).

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
