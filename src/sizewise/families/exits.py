"""Early exits: ways out of a model at several depths, each with logits of its own.

    images -> stem -> blocks -> blocks -> ... -> head -> logits
                         |         |
                       exit      exit -> logits
                         |
                       logits

The exit of a feature map is that of DepthFL: a gate that weighs the map, then one separable block
for each stage of the model that is still to come, pooling and a linear layer. Where the hidden
tensor has the shape of the last one already, the exit is another head like the model's own. The
last exit is the model's head itself. `MultiExit` holds the blocks up to its last exit and nothing
behind it; `InPlaceExits` does so in a model whose own forward stays in charge.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sizewise.common import rng
from sizewise.errors import ModelError
from sizewise.models.common import chain, initialise_convolutions
from sizewise.surgery import norms
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.dropping import stages
from sizewise.surgery.in_place import InPlace, enter, holders
from sizewise.surgery.links import channels_last
from sizewise.torch_tools.remaking import clone, remade
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


class Mean(nn.Module):
    """The mean of a text's or an image's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) or (B, H, W, C) to (B, C)."""
        return x.flatten(1, -2).mean(1)


def token_exit(shape: Sequence[int], classes: int) -> nn.Sequential:
    """Return an exit for tokens (T, C), or a map with channels last: norm, mean, linear layer."""
    channels = shape[-1]
    linear = nn.Linear(channels, classes)
    return chain(norm=nn.LayerNorm(channels), mean=Mean(), linear=linear)


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


class InPlaceExits(MultiExit):
    """The same for a model whose own forward stays in charge, and is left at the last exit.

    Attributes:
        steering: What the model's blocks obey.
    """

    parts: InPlace

    def __init__(
        self, model: nn.Module, parts: InPlace, exits: Mapping[int, nn.Module | None]
    ) -> None:
        """Take a whole model apart; it is not the caller's any more. None is the head's exit."""
        nn.Module.__init__(self)
        self.model, self.parts, self.stops = model, parts, tuple(exits)
        ways = {str(stop): way for stop, way in exits.items() if way is not None}
        self.exits = nn.ModuleDict(ways)
        for way in ways.values():
            if isinstance(way, OwnHead):
                way.share_stem(model)
        last, count = self.stops[-1], len(parts.blocks)
        for number in range(last, count):
            parts.leave_out(model, number)
        gone = [name for name, block in parts.between if block >= last]
        for holder, name in holders(model, (*gone, *(parts.head if last < count else ()))):
            setattr(holder, name, None)
        self.steering = parts.steer(model)

    def logits(self, x: Tensor) -> list[Tensor]:
        """Return the logits (B, classes) of each exit for a batch."""
        count, last = len(self.parts.blocks), self.stops[-1]
        early = [stop for stop in self.stops if stop < count]
        end = last if last < count else None
        hidden, final = self.steering.hidden(self.model, x, early, end)
        found = [leave(self.exits[str(stop)], hidden.pop(stop), x) for stop in early]
        return found if final is None else [*found, final]


class OwnHead(nn.Module):
    """The way of a model from its last hidden tensor to logits, with weights of its own.

    It is a whole model without blocks; before the hidden tensor enters, its stem runs on the
    inputs, which masks and the like are made from. The stem is shared with another model.
    """

    def __init__(self, model: nn.Module, parts: InPlace) -> None:
        """Take a fresh model, which is not the caller's any more."""
        super().__init__()
        self.model, self.parts = model, parts
        self.entrance = parts.enterable(model)
        # What it computes between blocks is not used, so what for is no weight of anybody.
        for holder, name in holders(model, [name for name, _ in parts.between]):
            tensor = getattr(holder, name).detach()
            delattr(holder, name)
            holder.register_buffer(name, tensor, persistent=False)

    def share_stem(self, model: nn.Module) -> None:
        """Use the stem's tensors of another model."""
        own, other = (holders(one, self.parts.stem) for one in (self.model, model))
        for (mine, name), (theirs, _) in zip(own, other, strict=True):
            for table in ("_parameters", "_buffers"):
                if name in vars(mine)[table]:
                    vars(mine)[table][name] = vars(theirs)[table][name]

    def train(self, mode: bool = True) -> Self:
        """Set the mode, but let norms of the stem be: they have seen the batch already."""
        super().train(mode)
        names = (*self.parts.stem, *(name for name, _ in self.parts.between))
        for holder, _ in holders(self.model, names):
            if isinstance(holder, _NormBase):
                holder.training = False
        return self

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Return logits (B, classes) for a hidden tensor (B, ...) and the inputs behind it."""
        return enter(self.model, self.entrance, hidden, x)


def leave(way: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
    """Return the logits of an exit for a hidden tensor (B, ...) and the inputs behind it."""
    logits: Tensor = way(hidden, x) if isinstance(way, OwnHead) else way(hidden)
    return logits


def with_exits(task: Task, stops: Sequence[int]) -> nn.Module:
    """Build a task's model up to its last exit, given the blocks before each exit, ascending."""
    parts, model = task.parts, task.build()
    last = len(parts.blocks)
    ways = {stop: None if stop == last else _exit(task, stop) for stop in stops}
    if isinstance(parts, InPlace):
        return norms.prepare(InPlaceExits(model, parts, ways), task.recipe.norm)
    return norms.prepare(MultiExit(model, parts, ways), task.recipe.norm)


def _exit(task: Task, stop: int) -> nn.Module:
    """Return a new exit after so many blocks."""
    shapes = task.hidden_shapes
    shape = shapes[stop]
    with rng.seeded(task.seed, "exit", stop):
        if len(shape) == 3 and not channels_last(shapes[0], shapes[-1]):
            return map_exit(shape, path_to_end(shapes, stop), task.classes)
        if shape == shapes[-1]:  # Tokens, and features of equal layers: another head fits.
            return another_head(task, stop + 1)  # 0 is the model itself.
        if len(shape) == 1:
            return nn.Linear(shape[0], task.classes)
        if not task.every_token:
            return token_exit(shape, task.classes)
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
    if isinstance(task.parts, InPlace):
        return OwnHead(task.build(draw=draw), task.parts)
    return remade(task.head(draw), clone)
