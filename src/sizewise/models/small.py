"""Small models: quick to train, easy to compute by hand."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from sizewise.common.widths import scaled
from sizewise.errors import ModelError
from sizewise.models.common import chain, normed, pooled
from sizewise.surgery.anatomy import Staged


def linear(*, classes: int, image: tuple[int, int, int]) -> Staged:
    """Return multinomial logistic regression: no blocks, and no width to scale."""
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

    `hidden` has the units of each hidden layer; the first is the stem, the others are the blocks.
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

    `layers` has the channels of each layer; the first is the stem, the others are the blocks.
    `[64, 128, 256, 512]` is the network that HeteroFL trains on MNIST.
    """
    if not layers or min(image[1:]) < 2 ** (len(layers) - 1):
        raise ModelError(
            f"a cnn has a layer or more and halves the image between layers; {len(layers)} layers "
            f"do not suit images of {image[1]}x{image[2]}, choose another number"
        )
    counts = [image[0], *(scaled(layer, width, rounding) for layer in layers)]
    convolutions = [normed(*sizes, relu=nn.ReLU()) for sizes in pairwise(counts)]
    for convolution in convolutions[:-1]:
        convolution.add_module("pool", nn.MaxPool2d(2))
    return Staged(convolutions[0], convolutions[1:], pooled(counts[-1], classes))
