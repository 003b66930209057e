"""The five networks of FedIN's Table I: the same extractor and classifier, other layers between.

Chan, Jiang, Deng, Ngai: "FedIN: Federated Intermediate Layers Learning for Model Heterogeneity"
(https://arxiv.org/abs/2304.00759). The table's text does not have all of its cells, so the repeats
of the last stage are those of the same author's earlier code.

The stem is the extractor, the head is the classifier, a linear layer. The last block is the average
pool, so that what goes into the head is one vector for each image.
"""

from functools import partial
from typing import Literal

from torch import Tensor, nn

from sizewise.common.widths import scaled
from sizewise.models.common import Shortcut, chain, initialise_convolutions, normed
from sizewise.surgery.anatomy import Staged

REPEATS = {"a": (2, 3, 5), "b": (1, 1, 1), "c": (2, 2, 2), "d": (1, 3, 3), "e": (1, 1, 2)}
"""How many units follow the first one of each stage."""


class Unit(Shortcut):
    """A 1x1 and a 3x3 convolution, each before a norm, and a shortcut around them."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, stride)
        self.norm1 = nn.BatchNorm2d(inner)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.projection = normed(inputs, outputs, 1, stride, bias=True) if project else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, ceil(h / stride), ceil(w / stride))."""
        return self.joined(x, self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))


def fedin(
    letter: Literal["a", "b", "c", "d", "e"],
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
    base: int = 64,
    share_repeats: bool = False,
) -> Staged:
    """Return one of the models A to E.

    `base` is the channels of the extractor at width 1; the stages have 4, 8 and 16 times as many.
    `share_repeats` repeats one unit in each stage, as in the author's earlier code; otherwise every
    unit has weights of its own.
    """

    def channels(times: int) -> int:
        return scaled(base * times, width, rounding)

    blocks: list[nn.Module] = []
    inputs = channels(1)
    for stage, count in enumerate(REPEATS[letter]):
        inner, outputs = channels(2**stage), channels(4 * 2**stage)
        blocks.append(Unit(inputs, inner, outputs, 1 if stage == 0 else 2, project=True))
        inputs = outputs
        new = [Unit(inputs, inner, outputs, 1, project=False) for _ in range(count)]
        blocks += new[:1] * count if share_repeats else new
    pool = nn.MaxPool2d(3, 2, padding=1)
    model = Staged(
        stem=normed(image[0], channels(1), bias=True, relu=nn.ReLU(), pool=pool),
        blocks=[*blocks, chain(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())],
        head=nn.Linear(inputs, classes),
    )
    return initialise_convolutions(model)


fedin_a = partial(fedin, "a")
fedin_b = partial(fedin, "b")
fedin_c = partial(fedin, "c")
fedin_d = partial(fedin, "d")
fedin_e = partial(fedin, "e")
