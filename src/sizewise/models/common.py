"""What the factories of the zoo share."""

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn

from sizewise.errors import ModelError


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


def check_output(model: nn.Module, classes: int, image: tuple[int, int, int]) -> None:
    """Make sure that a model turns images into one logit per class.

    Args:
        model: Any module; neither it nor the global random state is changed.
        classes: Expected logits per image.
        image: Shape of one image, (channels, height, width).

    Raises:
        ModelError: It fails on such images, or gives something else.
    """
    # A copy in eval mode: whatever its forward writes (norm statistics, caches) stays behind.
    # Two images, so that a stray squeeze() of the batch dimension shows.
    try:
        probe = copy.deepcopy(model).eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits: object = probe(torch.zeros(2, *image))
    except Exception as error:  # a model of the user's may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"{type(model).__name__} cannot run on images of shape {image}: {reason}"
        ) from error
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{type(model).__name__} gives a {type(logits).__name__}, not a tensor of logits; "
            "wrap it in a module whose forward returns the logits"
        )
    if logits.ndim == 2 and logits.shape[1] != classes:
        raise ModelError(
            f"{type(model).__name__} gives {logits.shape[1]} outputs for {classes} classes; "
            "give its last layer one output per class"
        )
    if logits.shape != (2, classes):
        raise ModelError(
            f"{type(model).__name__} gives shape {tuple(logits.shape)} for a batch of 2 images; "
            f"expected (2, {classes}): logits per image and class"
        )
