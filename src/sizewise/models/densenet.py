"""DenseNet-BC for small images.

Huang, Liu, van der Maaten, Weinberger: "Densely Connected Convolutional Networks", CVPR 2017
(https://arxiv.org/abs/1608.06993). SLT trains DenseNet-40 with growth 12: a 24-channel stem and
three groups of 6 bottleneck layers, with a halving transition after the first and the second.

Every bottleneck layer and every transition is a block, so each can be trained or frozen alone.
"""

import torch
from torch import Tensor, nn

from sizewise.common.widths import scaled, scaled_growth
from sizewise.errors import ModelError
from sizewise.models.common import chain, initialise_convolutions, pooled, repeats
from sizewise.surgery.anatomy import Staged


class DenseLayer(nn.Module):
    """A 1x1 bottleneck and a 3x3 convolution that put new channels in front of the old ones."""

    def __init__(self, inputs: int, bottleneck: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(inputs, bottleneck, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(bottleneck, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, growth + inputs, h, w)."""
        narrow = self.conv1(self.relu1(self.norm1(x)))
        new = self.conv2(self.relu2(self.norm2(narrow)))
        return torch.cat([new, x], dim=1)


def densenet(
    depth: int,
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
    growth: int = 12,
) -> Staged:
    """Return a DenseNet-BC of depth 6n + 4 with three groups of n bottleneck layers.

    Images have at least 4x4 pixels. `growth` is the number of new channels per layer, which follow
    `widths.scaled_growth`; the stem has twice and a bottleneck four times as many.
    """
    if min(image[1:]) < 4:
        raise ModelError(
            f"a densenet halves images twice and needs at least 4x4, but {image[1]}x{image[2]} "
            "came; use mlp or linear for images this small"
        )
    n = repeats("densenet", depth, extra=4)
    bottleneck = scaled(4 * growth, width, rounding)
    # Channel counts are followed at full width and scaled where a layer is made: rounded counts
    # would drift apart from the totals that a cut of the full model has.
    channels = 2 * growth
    blocks: list[nn.Module] = []
    for group in range(3):
        for _ in range(n):
            new = scaled_growth(channels, growth, width, rounding)
            blocks.append(DenseLayer(scaled(channels, width, rounding), bottleneck, new))
            channels += growth
        if group < 2:
            inputs, channels = scaled(channels, width, rounding), channels // 2
            transition = chain(
                norm=nn.BatchNorm2d(inputs),
                relu=nn.ReLU(),
                conv=nn.Conv2d(inputs, scaled(channels, width, rounding), 1, bias=False),
                pool=nn.AvgPool2d(2),
            )
            blocks.append(transition)
    features = scaled(channels, width, rounding)
    model = Staged(
        stem=chain(
            conv=nn.Conv2d(image[0], scaled(2 * growth, width, rounding), 3, padding=1, bias=False)
        ),
        blocks=blocks,
        head=pooled(features, classes, norm=nn.BatchNorm2d(features), relu=nn.ReLU()),
    )
    return initialise_convolutions(model)
