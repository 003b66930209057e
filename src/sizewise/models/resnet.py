"""ResNets for small images, in the two forms that the methods train.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016
(https://arxiv.org/abs/1512.03385).

* `cifar_resnet`, depth 6n + 2, 16/32/64 channels: SLT (ResNet-20, 44, 56) and NeFL (56, 110).
* `resnet18` and `resnet34`, 64/128/256/512 channels behind a 3x3 stem: NeFL with max-pooling,
  FjORD and DepthFL without.
* `wide_resnet101_2`, bottlenecks twice as wide (Zagoruyko, Komodakis, BMVC 2016): NeFL.
"""

from functools import partial
from itertools import pairwise
from math import ceil

from torch import Tensor, nn

from sizewise.common.widths import scaled
from sizewise.errors import ModelError
from sizewise.models.common import (
    Shortcut,
    in_stages,
    initialise_convolutions,
    normed,
    pooled,
    repeats,
)
from sizewise.surgery.anatomy import Staged
from sizewise.surgery.step_sizes import Branch


class BasicBlock(Shortcut):
    """Two 3x3 convolutions, each before a norm, and a shortcut added before the last ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, projection: int = 1) -> None:
        """Build the block; projection is the kernel size of a shortcut that changes the shape."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.branch = Branch()
        changes = stride != 1 or inputs != outputs
        self.projection = normed(inputs, outputs, projection, stride) if changes else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, ceil(h / stride), ceil(w / stride))."""
        residual = self.branch(self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))
        return self.joined(x, residual)


class Bottleneck(Shortcut):
    """A 1x1, a 3x3 and a 1x1 convolution, each before a norm, and a shortcut around them."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.branch = Branch()
        changes = stride != 1 or inputs != outputs
        self.projection = normed(inputs, outputs, 1, stride) if changes else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, ceil(h / stride), ceil(w / stride))."""
        inner = self.relu2(self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))
        return self.joined(x, self.branch(self.norm3(self.conv3(inner))))


def cifar_resnet(
    depth: int,
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
    projection: int = 3,
    global_pool: bool = False,
) -> Staged:
    """Return a ResNet of depth 6n + 2 with n blocks of 16, 32 and 64 channels each.

    The defaults are SLT's network: 3x3 projections, and a 4x4 average pool whose 2x2 output (for
    32x32 images) is flattened into the classifier. A last feature map that four does not divide is
    pooled into the next smaller number of near-equal windows, at least one, so that 28x28 images
    (7x7 at the end) lose no border and 8x8 images (2x2 at the end) still work.

    `projection` is the kernel size of the projections, 1 in NeFL's network; `global_pool` averages
    the whole last feature map, as that network does.
    """
    if depth in (50, 152):  # 6n + 2 too, but whoever writes resnet50 means another network
        raise ModelError(
            f"resnet{depth} is known as an ImageNet network with bottleneck blocks, which is not "
            "in the zoo; use resnet44 or resnet56, or your own as 'package.module:factory'"
        )
    stages = [scaled(channels, width, rounding) for channels in (16, 32, 64)]
    rows, columns = (
        1 if global_pool else max(ceil(side / 4) // 4, 1)  # two strides of 2, then the pool's 4
        for side in image[1:]
    )
    lengths = [repeats("resnet", depth, extra=2)] * 3
    block = partial(BasicBlock, projection=projection)
    model = Staged(
        stem=normed(image[0], stages[0], relu=nn.ReLU()),
        blocks=[*in_stages(block, stages[0], [*zip(stages)], lengths)],
        head=pooled(stages[2], classes, rows, columns),
    )
    return initialise_convolutions(model)


def four_stages(
    lengths: tuple[int, int, int, int],
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
    maxpool: bool = True,
    base: int = 64,
) -> Staged:
    """Return a ResNet for small images: stages of 64, 128, 256 and 512 channels.

    `maxpool` halves the image in the stem (NeFL); FjORD and DepthFL do not. `base` is the first
    stage's channels at width 1; each later stage has twice as many.
    """
    if base < 1:
        raise ModelError(f"the first stage has at least one channel; base = {base} came")
    stages = [scaled(base * 2**stage, width, rounding) for stage in range(4)]
    stem = normed(image[0], stages[0], relu=nn.ReLU())
    if maxpool:
        stem.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    blocks = [*in_stages(BasicBlock, stages[0], [*zip(stages)], lengths)]
    return initialise_convolutions(Staged(stem, blocks, pooled(stages[3], classes)))


resnet18 = partial(four_stages, (2, 2, 2, 2))
resnet34 = partial(four_stages, (3, 4, 6, 3))


def wide_resnet101_2(
    *, classes: int, image: tuple[int, int, int], width: float = 1.0, rounding: str = "floor"
) -> Staged:
    """Return Wide-ResNet-101-2: 3, 4, 23, 3 bottlenecks of 128 to 1024 channels inside.

    The stem is ImageNet's, a 7x7 convolution and max-pooling.
    """
    inputs, *stages = (scaled(64 * 2**power, width, rounding) for power in range(6))
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    stem = normed(image[0], inputs, 7, 2, relu=nn.ReLU(), pool=pool)
    # Each stage has half as many channels inside as outside: 128 and 256, to 1024 and 2048.
    blocks = [*in_stages(Bottleneck, inputs, [*pairwise(stages)], (3, 4, 23, 3))]
    return initialise_convolutions(Staged(stem, blocks, pooled(stages[-1], classes)))
