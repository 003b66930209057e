"""Early exits: ways out of a model at several depths, each with logits of its own.

    images -> stem -> blocks -> blocks -> ... -> head -> logits
                         |         |
                       exit      exit -> logits
                         |
                       logits

The exit of a feature map is that of DepthFL: a gate that weighs the map, then one separable block
for each stage of the model that is still to come, pooling and a linear layer. The last exit is the
model's own head. `MultiExit` holds the blocks up to its last exit and nothing behind it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from sizewise.common import rng
from sizewise.errors import ModelError
from sizewise.models.common import chain, initialise_convolutions
from sizewise.surgery import norms
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.dropping import stages
from sizewise.training.task import Task

SPREAD = 4
"""Exits of a model without stages."""

MOST_STAGES = 8
"""A model whose shape changes more often has no stages: a DenseNet grows in every block."""


def stage_ends(shapes: Sequence[torch.Size]) -> list[int]:
    """Return after how many blocks each stage of a model ends, the last with the model.

    A stage ends where the next block gives another shape. Where all blocks give one shape, or
    nearly each its own, four places are spread over the blocks.

    Args:
        shapes: Shape of one sample's hidden tensor after the stem and after each block.
    """
    last = len(shapes) - 1
    ends = [stage.stop for stage in stages(shapes)]
    if 1 < len(ends) <= MOST_STAGES:
        return ends
    count = max(1, min(SPREAD, last))
    return [last * (number + 1) // count for number in range(count)]


def path_to_end(shapes: Sequence[torch.Size], stop: int) -> list[int]:
    """Return the channels of a feature map after so many blocks, and of each stage that follows.

    Stages whose hidden tensors are no feature maps (C, H, W) any more are left out.
    """
    followed = [shapes[stop], *(shapes[end] for end in stage_ends(shapes) if end > stop)]
    changes = [b for a, b in pairwise(followed) if a != b and len(b) == 3]
    return [shape[0] for shape in (shapes[stop], *changes)]


def separable(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3x3 convolutions, each split into one per channel and a 1x1 across them.

    The first has a stride of 2; a map of one pixel stays one.
    """
    return chain(
        depthwise1=nn.Conv2d(inputs, inputs, 3, 2, padding=1, groups=inputs, bias=False),
        pointwise1=nn.Conv2d(inputs, inputs, 1, bias=False),
        norm1=nn.BatchNorm2d(inputs),
        relu1=nn.ReLU(),
        depthwise2=nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
        pointwise2=nn.Conv2d(inputs, outputs, 1, bias=False),
        norm2=nn.BatchNorm2d(outputs),
        relu2=nn.ReLU(),
    )


class Gate(nn.Module):
    """Attention: weighs each entry of a feature map by a number between 0 and 1."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.weigh = chain(
            separable=separable(shape[0], shape[0]),
            norm=nn.BatchNorm2d(shape[0]),
            relu=nn.ReLU(),
            # To the map's own size, which is not twice the half of it where a side is odd.
            up=nn.Upsample(tuple(shape[1:]), mode="bilinear"),
            sigmoid=nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        weights: Tensor = self.weigh(x)
        return weights * x


def map_exit(shape: Sequence[int], channels: Sequence[int], classes: int) -> nn.Sequential:
    """Return the exit of a feature map.

    Args:
        shape: Shape of one sample's map, (C, H, W).
        channels: C, and the channels of each stage of the model that follows; see `path_to_end`.
        classes: Outputs.
    """
    steps = (separable(inputs, outputs) for inputs, outputs in pairwise(channels))
    way = chain(
        gate=Gate(shape),
        stages=nn.Sequential(*steps),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        linear=nn.Linear(channels[-1], classes),
    )
    initialise_convolutions(way)
    return way


class MultiExit(nn.Module):
    """The first blocks of a model and some exits; its logits are the mean of theirs.

    Attributes:
        model: The model, without the blocks that come after the last exit.
        parts: The anatomy of the whole model.
        stops: The number of blocks before each exit, ascending.
        exits: By that number, a module from the hidden tensor to logits; the model's end has none,
            as its exit is the model's head.
    """

    def __init__(
        self, model: nn.Module, parts: Anatomy, exits: Mapping[int, nn.Module | None]
    ) -> None:
        """Take a whole model apart; it is not the caller's any more. None is the head's exit."""
        super().__init__()
        self.model, self.parts, self.stops = model, parts, tuple(exits)
        ways = {str(stop): way for stop, way in exits.items() if way is not None}
        self.exits = nn.ModuleDict(ways)
        gone = list(parts.blocks[self.stops[-1] :])
        gone += parts.head if self.stops[-1] < len(parts.blocks) else ()
        for path in gone:
            owner, _, name = path.rpartition(".")
            delattr(model.get_submodule(owner), name)

    def logits(self, x: Tensor) -> list[Tensor]:
        """Return the logits (B, classes) of each exit for a batch."""
        found = []
        x = self.parts.run_stem(self.model, x)
        for number in range(self.stops[-1] + 1):
            if number:
                x = self.parts.run_blocks(self.model, x, number - 1, number)
            if number in self.stops:
                last = number == len(self.parts.blocks)
                way = partial(self.parts.run_head, self.model) if last else self.exits[str(number)]
                found.append(way(x))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the exits' logits (B, classes) for a batch."""
        first, *others = self.logits(x)
        return sum(others, first) / len(self.stops)


def with_exits(task: Task, stops: Sequence[int]) -> nn.Module:
    """Build a task's model up to its last exit, given the blocks before each exit, ascending."""
    last = len(task.parts.blocks)
    ways = {stop: None if stop == last else _exit(task, stop) for stop in stops}
    return norms.prepare(MultiExit(task.build(), task.parts, ways), task.recipe.norm)


def _exit(task: Task, stop: int) -> nn.Module:
    """Return a new exit after so many blocks."""
    shapes = task.hidden_shapes
    shape = shapes[stop]
    with rng.seeded(task.seed, "exit", stop):
        if len(shape) == 3:
            return map_exit(shape, path_to_end(shapes, stop), task.classes)
        if shape == shapes[-1]:  # Tokens, and features of equal layers: another head fits.
            return another_head(task, stop + 1)  # 0 is the model itself.
        if len(shape) == 1:
            return nn.Linear(shape[0], task.classes)
    raise ModelError(
        f"after {stop} blocks a sample has the shape {tuple(shape)}, for which there is no exit; "
        "name other places in method.exits"
    )


def another_head(task: Task, draw: int) -> nn.Module:
    """Return a head like the model's own, with weights of its own.

    Args:
        task: Says how to build the model.
        draw: Which of several independent initialisations.
    """
    model = task.build(draw=draw)
    return nn.Sequential(*(model.get_submodule(path) for path in task.parts.head))
