"""Pre-activation ResNets for small images.

He, Zhang, Ren, Sun: "Identity Mappings in Deep Residual Networks", ECCV 2016
(https://arxiv.org/abs/1603.05027). FeDepth, HeteroFL and SplitMix train PreResNet-20.

The public codes of these methods hold three different networks under this name. Ours is the
paper's: the shortcut carries x itself, the stem has no norm, and the head starts with norm and
ReLU. Where the shape changes, the shortcut is a 1x1 convolution of the activated input.
"""

from torch import Tensor, nn

from sizewise.common.widths import scaled
from sizewise.models.common import chain, in_stages, initialise_convolutions, pooled, repeats
from sizewise.surgery.anatomy import Staged
from sizewise.surgery.step_sizes import Branch


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after norm and ReLU, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.branch = Branch()
        changes = stride != 1 or inputs != outputs
        self.projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, ceil(h / stride), ceil(w / stride))."""
        active = self.relu1(self.norm1(x))
        residual = self.branch(self.conv2(self.relu2(self.norm2(self.conv1(active)))))
        shortcut = x if self.projection is None else self.projection(active)
        out: Tensor = residual + shortcut
        return out

    def dropped(self) -> nn.Module:
        """Return what is left of the block without its convolutions."""
        if self.projection is None:
            return nn.Identity()
        return chain(norm1=self.norm1, relu1=self.relu1, projection=self.projection)


def preresnet(
    depth: int,
    *,
    classes: int,
    image: tuple[int, int, int],
    width: float = 1.0,
    rounding: str = "floor",
) -> Staged:
    """Return a pre-activation ResNet of depth 6n + 2: n blocks each of 16, 32 and 64 channels."""
    lengths = [repeats("preresnet", depth, extra=2)] * 3
    stages = [scaled(channels, width, rounding) for channels in (16, 32, 64)]
    model = Staged(
        stem=chain(conv=nn.Conv2d(image[0], stages[0], 3, padding=1, bias=False)),
        blocks=in_stages(PreActivationBlock, stages[0], [*zip(stages)], lengths),
        head=pooled(stages[2], classes, norm=nn.BatchNorm2d(stages[2]), relu=nn.ReLU()),
    )
    return initialise_convolutions(model)
