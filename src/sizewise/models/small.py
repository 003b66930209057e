"""Small models: quick to train, easy to compute by hand."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from sizewise.common.widths import scaled
from sizewise.errors import ModelError
from sizewise.models.common import chain
from sizewise.surgery.anatomy import Staged


def linear(*, classes: int, image: tuple[int, int, int]) -> Staged:
    """Return multinomial logistic regression: no blocks, and no width to scale.

    Args:
        classes: Outputs.
        image: Shape of one image, (channels, height, width).
    """
    return Staged(nn.Flatten(), [], nn.Linear(prod(image), classes))


def mlp(
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
    hidden: Sequence[int] = (200, 200),
) -> Staged:
    """Return a multi-layer perceptron; the default is the "2NN" of McMahan et al. (2017).

    Args:
        classes: Outputs.
        image: Shape of one image, (channels, height, width).
        width: Ratio that scales the hidden layers.
        rounding: How scaled layers are rounded, a rule of `widths.scaled`.
        hidden: Units of each hidden layer; the first is the stem, the others are the blocks.
    """
    if not hidden:
        raise ModelError("an mlp has at least one hidden layer, none came; use linear instead")
    units = [scaled(layer, width, rounding) for layer in hidden]
    return Staged(
        stem=chain(flatten=nn.Flatten(), linear=nn.Linear(prod(image), units[0]), relu=nn.ReLU()),
        blocks=(
            chain(linear=nn.Linear(inputs, outputs), relu=nn.ReLU())
            for inputs, outputs in pairwise(units)
        ),
        head=nn.Linear(units[-1], classes),
    )


def cnn(
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
    layers: Sequence[int] = (32, 64, 128),
) -> Staged:
    """Return a plain convolutional network with a halving max-pool between its layers.

    `layers = [64, 128, 256, 512]` is the network that HeteroFL trains on MNIST.

    Args:
        classes: Outputs.
        image: Shape of one image, (channels, height, width).
        width: Ratio that scales all channel counts.
        rounding: How scaled channel counts are rounded, a rule of `widths.scaled`.
        layers: Channels of each layer; the first is the stem, the others are the blocks.
    """
    if not layers or min(image[1:]) < 2 ** (len(layers) - 1):
        raise ModelError(
            f"a cnn has a layer or more and halves the image between layers; {len(layers)} layers "
            f"do not suit images of {image[1]}x{image[2]}, choose another number"
        )
    counts = [image[0], *(scaled(layer, width, rounding) for layer in layers)]
    convolutions = [_convolution(inputs, outputs) for inputs, outputs in pairwise(counts)]
    for convolution in convolutions[:-1]:
        convolution.add_module("pool", nn.MaxPool2d(2))
    return Staged(
        stem=convolutions[0],
        blocks=convolutions[1:],
        head=chain(
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            linear=nn.Linear(counts[-1], classes),
        ),
    )


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return chain(
        conv=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(outputs),
        relu=nn.ReLU(),
    )
