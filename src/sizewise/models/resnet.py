"""ResNets for small images, in the two forms that the methods train.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016
(https://arxiv.org/abs/1512.03385).

* `cifar_resnet`, depth 6n + 2, 16/32/64 channels: SLT (ResNet-20, 44, 56) and NeFL (56, 110).
* `resnet18` and `resnet34`, 64/128/256/512 channels behind a 3x3 stem: NeFL with max-pooling,
  FjORD and DepthFL without.
* `wide_resnet101_2`, bottlenecks twice as wide (Zagoruyko, Komodakis, BMVC 2016): NeFL.
"""

from collections.abc import Sequence
from math import ceil

from torch import Tensor, nn

from sizewise.common.widths import scaled
from sizewise.errors import ModelError
from sizewise.models.common import chain, initialise_convolutions, repeats
from sizewise.surgery.anatomy import Staged
from sizewise.surgery.step_sizes import Branch


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each before a norm, and a shortcut added before the last ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, projection: int) -> None:
        """Build the block.

        Args:
            inputs: Channels that come in.
            outputs: Channels that go out.
            stride: Of the first convolution and the projection.
            projection: Kernel size of the shortcut's convolution where the shape changes, 1 or 3.
        """
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.branch = Branch()
        self.projection: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.projection = chain(
                conv=nn.Conv2d(
                    inputs, outputs, projection, stride, padding=projection // 2, bias=False
                ),
                norm=nn.BatchNorm2d(outputs),
            )
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, ceil(h / stride), ceil(w / stride))."""
        residual = self.branch(self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))
        shortcut = x if self.projection is None else self.projection(x)
        out: Tensor = self.relu2(residual + shortcut)
        return out

    def dropped(self) -> nn.Module:
        """Return what is left without the convolutions; what comes in is not negative already."""
        if self.projection is None:
            return nn.Identity()
        return chain(projection=self.projection, relu2=self.relu2)


class Bottleneck(nn.Module):
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
        self.projection: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.projection = chain(
                conv=nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                norm=nn.BatchNorm2d(outputs),
            )
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, ceil(h / stride), ceil(w / stride))."""
        inner = self.relu2(self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))
        residual = self.branch(self.norm3(self.conv3(inner)))
        shortcut = x if self.projection is None else self.projection(x)
        out: Tensor = self.relu3(residual + shortcut)
        return out

    def dropped(self) -> nn.Module:
        """Return what is left without the convolutions; what comes in is not negative already."""
        if self.projection is None:
            return nn.Identity()
        return chain(projection=self.projection, relu3=self.relu3)


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

    Args:
        depth: Layers with weights, projections not counted.
        classes: Outputs.
        image: Shape of one image, (channels, height, width).
        width: Ratio that scales all channel counts.
        rounding: How scaled channel counts are rounded, a rule of `widths.scaled`.
        projection: Kernel size of the projections; NeFL's network has 1.
        global_pool: Average the whole last feature map, as NeFL's network does.
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
    model = Staged(
        stem=_stem(image[0], stages[0]),
        blocks=_stages(stages, [repeats("resnet", depth, extra=2)] * 3, projection),
        head=chain(
            pool=nn.AdaptiveAvgPool2d((rows, columns)),
            flatten=nn.Flatten(),
            linear=nn.Linear(stages[2] * rows * columns, classes),
        ),
    )
    initialise_convolutions(model)
    return model


def resnet18(
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
    maxpool: bool = True,
    base: int = 64,
) -> Staged:
    """Return ResNet-18 for small images: 2 blocks each of 64, 128, 256 and 512 channels.

    Args:
        classes: Outputs.
        image: Shape of one image, (channels, height, width).
        width: Ratio that scales all channel counts.
        rounding: How scaled channel counts are rounded, a rule of `widths.scaled`.
        maxpool: Halve the image in the stem (NeFL); FjORD and DepthFL do not.
        base: Channels of the first stage at width 1; each later stage has twice as many.
    """
    return _four_stages([2, 2, 2, 2], classes, image, width, rounding, maxpool, base)


def resnet34(
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
    maxpool: bool = True,
    base: int = 64,
) -> Staged:
    """Return ResNet-34 for small images: 3, 4, 6, 3 blocks; arguments as for `resnet18`."""
    return _four_stages([3, 4, 6, 3], classes, image, width, rounding, maxpool, base)


def wide_resnet101_2(
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
) -> Staged:
    """Return Wide-ResNet-101-2: 3, 4, 23, 3 bottlenecks of 128 to 1024 channels inside.

    The stem is ImageNet's, a 7x7 convolution and max-pooling; arguments as for `resnet18`.
    """
    inner = [scaled(channels, width, rounding) for channels in (128, 256, 512, 1024)]
    outer = [scaled(channels, width, rounding) for channels in (256, 512, 1024, 2048)]
    inputs = scaled(64, width, rounding)
    stem = chain(
        conv=nn.Conv2d(image[0], inputs, 7, stride=2, padding=3, bias=False),
        norm=nn.BatchNorm2d(inputs),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    blocks = []
    for stage, length in enumerate((3, 4, 23, 3)):
        for index in range(length):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(Bottleneck(inputs, inner[stage], outer[stage], stride))
            inputs = outer[stage]
    head = chain(
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        linear=nn.Linear(inputs, classes),
    )
    model = Staged(stem, blocks, head)
    initialise_convolutions(model)
    return model


def _four_stages(
    lengths: Sequence[int],
    classes: int,
    image: tuple[int, int, int],
    width: float,
    rounding: str,
    maxpool: bool,
    base: int,
) -> Staged:
    if base < 1:
        raise ModelError(f"the first stage has at least one channel; base = {base} came")
    stages = [scaled(base * 2**stage, width, rounding) for stage in range(4)]
    stem = _stem(image[0], stages[0])
    if maxpool:
        stem.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    model = Staged(
        stem=stem,
        blocks=_stages(stages, lengths, projection=1),
        head=chain(
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            linear=nn.Linear(stages[3], classes),
        ),
    )
    initialise_convolutions(model)
    return model


def _stem(inputs: int, outputs: int) -> nn.Sequential:
    return chain(
        conv=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(outputs),
        relu=nn.ReLU(),
    )


def _stages(channels: Sequence[int], lengths: Sequence[int], projection: int) -> list[BasicBlock]:
    """Return the blocks of all stages in order; each stage but the first halves the image."""
    blocks: list[BasicBlock] = []
    inputs = channels[0]
    for stage, (outputs, length) in enumerate(zip(channels, lengths, strict=True)):
        for index in range(length):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(BasicBlock(inputs, outputs, stride, projection))
            inputs = outputs
    return blocks
