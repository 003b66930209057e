"""Training a model one run of blocks at a time.

    images -> stem -> frozen blocks -> blocks that learn -> way out -> logits
              no activations are kept | they are kept here

`Blocks` says which part of a model a stage trains, `Run` what a stage does. `Blockwise` holds what
takes part: the model, a way out after each run of blocks, and further models that it may learn
together with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.common import rng
from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.plan import Submodel, Work
from sizewise.exchange.state import State
from sizewise.exchange.view import TensorSlice, View
from sizewise.families.exits import OwnHead, another_head, leave, token_exit
from sizewise.families.submodels import Submodels
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.in_place import InPlace
from sizewise.surgery.links import channels_last, skip_link, strides
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

PEERS = "peers."
"""Where further models are in a device's module."""


@dataclass(frozen=True)
class Blocks:
    """What a stage does with each block of a model; those it does not name are not run.

    Attributes:
        learn: Blocks that learn, consecutive.
        frozen: Blocks that run before them, without keeping anything.
        stem: Whether the stem learns.
        buffered: Whether inputs are what the frozen blocks make of the images.
        micro: Samples that run through the frozen blocks at once; default: the batch.
    """

    learn: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    stem: bool = True
    buffered: bool = False
    micro: int | None = None

    @property
    def stop(self) -> int:
        """The number of blocks up to the last that learns: where its way out is."""
        return self.learn[-1] + 1

    @property
    def label(self) -> str:
        """The blocks that learn, for people: counted from 1."""
        first, last = self.learn[0] + 1, self.learn[-1] + 1
        name = f"{first}" if first == last else f"{first}-{last}"
        around = [str(n + 1) for n in range(self.learn[0]) if n not in self.frozen]
        if around:
            name += f" without {', '.join(around)}"
        return name if self.micro is None else f"{name} ({self.micro} at a time before)"


@dataclass(frozen=True)
class Run(Work):
    """Training some blocks, perhaps together with peers; without values, the model as it is.

    Attributes:
        blocks: What is done with the model's blocks; None: it is trained as it is.
        peers: And with those of each peer.
    """

    blocks: Blocks | None = None
    peers: tuple[Blocks, ...] = ()

    @property
    def label(self) -> str:
        """What people call it."""
        if self.blocks is None:
            return "all"
        return " + ".join(part.label for part in (self.blocks, *self.peers))


@dataclass(frozen=True)
class TakenApart(Submodel):
    """The full model, of which a device trains some blocks at a time; without values, as it is.

    Attributes:
        apart: Whether it is taken apart.
        exits: The numbers of blocks after which there is a way out with weights.
        peers: How many further models a device trains beside it.
        label: What people call it.
    """

    apart: bool = False
    exits: tuple[int, ...] = ()
    peers: int = 0
    label: str = field(default="full", compare=False)


class BlockSubmodels(Submodels):
    """The full model, as it is or taken apart; `ScheduleOptions` says what heads and links are."""

    def __init__(self, task: Task, heads: str, link: str) -> None:
        super().__init__(task)
        self.heads, self.link = heads, link

    @cached_property
    def parts(self) -> Anatomy:
        """Stem, blocks and head; who trains the model as it is does not need to know them."""
        parts = self.task.parts
        if not parts.blocks:
            raise ModelError(
                f"{self.task.model.name!r} has no blocks between stem and head to train in turn; "
                "name them in model.anatomy, or choose another method"
            )
        if self.in_place and self.link == "conv":
            raise ConfigError(
                f"method.link = 'conv' leads from a block straight to the head, and in "
                f"{self.task.model.name!r} only its own forward finds the way; use 'pad'"
            )
        return parts

    @property
    def in_place(self) -> bool:
        """Whether the model's own forward stays in charge."""
        return isinstance(self.task.parts, InPlace)

    def build(self, submodel: Any) -> nn.Module:
        """Build the model; for devices that take it apart, with ways out and peers."""
        if not submodel.apart:
            return self.task.build()
        exits = {stop: self._exit(stop) for stop in submodel.exits}
        model, *peers = (self.another(TakenApart()) for _ in range(1 + submodel.peers))
        links, shapes = self.heads == "skip", self.task.hidden_shapes
        return Blockwise(model, self.parts, shapes, exits, links, peers)

    def has_exit(self, stop: int) -> bool:
        """Return whether there are weights between so many blocks and the logits or the head."""
        if stop == len(self.parts.blocks):
            return False
        if self.heads == "auxiliary":
            return True
        shapes = self.task.hidden_shapes
        return self.link == "conv" and shapes[stop] != shapes[-1]

    def without_idle_exits(self, submodel: Any, blocks: Blocks | None) -> Any:
        """Return a submodel with no ways out but the one that a stage takes."""
        stop = None if blocks is None else blocks.stop
        return replace(submodel, exits=tuple(n for n in submodel.exits if n == stop))

    def _exit(self, stop: int) -> nn.Module:
        """Return a new way out after so many blocks: an auxiliary head, or a 1x1 convolution."""
        task = self.task
        shape, last = task.hidden_shapes[stop], task.hidden_shapes[-1]
        shapes = task.hidden_shapes
        with rng.seeded(task.seed, "exit", stop):
            if len(shape) == 1:  # Features of a perceptron, not of an image.
                to_head = self.heads == "skip"
                return nn.Linear(shape[0], last[0] if to_head else task.classes, not to_head)
            if self.heads == "skip":
                return nn.Conv2d(shape[0], last[0], 1, strides(shape, last), bias=False)
            if len(shape) != 3 or channels_last(shapes[0], shapes[-1]):
                # Where tokens have kept their shape, the model's own head fits.
                same = shape == last
                return another_head(task, stop) if same else token_exit(shape, task.classes)
            return nn.Sequential(
                task.norm(shape[0]),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(shape[0], task.classes),
            )

    def slices(self, submodel: Any) -> View:
        """Return where a device's tensors live: peers live nowhere but with it."""
        if not submodel.apart:
            return super().slices(submodel)
        main = self.view(TakenApart())
        names = [n for n in own_tensors(self.module(submodel)) if not n.startswith(PEERS)]
        inner = {name: name.partition(".")[2] for name in names if name.startswith("model.")}
        return {name: main[inner[name]] if name in inner else TensorSlice(name) for name in names}

    def parameters(self, state: State, main: Submodel) -> list[str]:
        """Return the names of the parameters, those of exits included."""
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        exits = [n for n in state.tensors if n.startswith("exits.") and not n.endswith(statistics)]
        return [*super().parameters(state, main), *exits]

    def learning(self, run: Run) -> tuple[str, ...]:
        """Return the prefixes of the names of what learns in a run."""
        own = self._learning("model", run.blocks) if run.blocks else ()
        peers = (self._learning(f"{PEERS}{n}", blocks) for n, blocks in enumerate(run.peers))
        return (*own, *chain.from_iterable(peers))

    @cached_property
    def _weights(self) -> list[str]:
        """The names of the model's parameters, each with a dot behind it."""
        return [f"{name}." for name, _ in self.pattern(TakenApart()).named_parameters()]

    def _learning(self, model: str, blocks: Blocks) -> Iterator[str]:
        """Yield the prefixes of what learns in one model; parts without weights have none."""
        parts = self.parts
        paths = [path for number in blocks.learn for path in parts.owned(number)]
        paths += parts.stem if blocks.stem else ()
        own = model == "model" and self.has_exit(blocks.stop)
        paths += parts.head if not own or self.heads == "skip" else ()
        for path in paths:
            if any(name.startswith(f"{path}.") for name in self._weights):
                yield f"{model}.{path}"
        if own:
            yield f"exits.{blocks.stop}"


class Blockwise(nn.Module):
    """A model with its parts, ways out of it, and peers: models that it learns together with.

    Attributes:
        shapes: Shape of one sample's hidden tensor after the stem and after each block.
        exits: By the number of blocks before it, a module from the hidden tensor to logits; or,
            where `links` is set, to the hidden tensor that the head expects.
        links: Whether exits lead to the head.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Anatomy,
        shapes: Sequence[torch.Size],
        exits: Mapping[int, nn.Module],
        links: bool,
        peers: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.model, self.parts, self.shapes, self.links = model, parts, tuple(shapes), links
        self.exits = nn.ModuleDict({str(stop): way for stop, way in exits.items()})
        self.peers = nn.ModuleList(peers)
        models = (model, *peers) if isinstance(parts, InPlace) else ()
        self.steerings = [parts.steer(one) for one in models if isinstance(parts, InPlace)]
        for way in exits.values():
            if isinstance(way, OwnHead):
                way.share_stem(model)

    def forward(self, x: Tensor, blocks: Blocks, model: nn.Module | None = None) -> Tensor:
        """Return the logits (B, classes) of a stage; default: those of the first model.

        If the stage is buffered, x is what the frozen blocks made of images, else images.
        """
        model = self.model if model is None else model
        if self.steerings:
            return self._in_place(x, blocks, model)
        if not blocks.buffered:
            x = self.parts.run_stem(model, x) if blocks.stem else self.before(x, blocks, model)
        x = self.parts.run_blocks(model, x, blocks.learn[0], blocks.stop)
        return self.leave(x, blocks.stop, model)

    def _in_place(self, images: Tensor, blocks: Blocks, model: nn.Module) -> Tensor:
        """Return logits where the model's own forward stays in charge; other blocks are passed.

        What is frozen keeps nothing, as nothing in it learns.
        """
        number = next(n for n, one in enumerate((self.model, *self.peers)) if one is model)
        runs, stop = {*blocks.frozen, *blocks.learn}, blocks.stop
        if str(stop) not in self.exits:
            return self.steerings[number].run(model, images, runs)
        found, _ = self.steerings[number].hidden(model, images, {stop}, stop, runs)
        return leave(self.exits[str(stop)], found[stop], images)

    @torch.no_grad()
    def before(self, images: Tensor, blocks: Blocks, model: nn.Module) -> Tensor:
        """Return what the stem and the frozen blocks make of images, in micro-batches."""

        def hidden(x: Tensor) -> Tensor:
            x = self.parts.run_stem(model, x)
            for number in blocks.frozen:
                x = self.parts.run_blocks(model, x, number, number + 1)
            return x

        if blocks.micro is None or blocks.micro >= len(images):
            return hidden(images)
        shape = self.shapes[blocks.frozen[-1] + 1 if blocks.frozen else 0]
        # Of token ids, too, blocks make floating-point numbers.
        kind = images.dtype if images.is_floating_point() else torch.get_default_dtype()
        out = images.new_empty((len(images), *shape), dtype=kind)
        parts = (torch.split(tensor, blocks.micro) for tensor in (images, out))
        for chunk, place in zip(*parts, strict=True):
            place.copy_(hidden(chunk))
        return out

    @torch.no_grad()
    def part(self, x: Tensor, number: int) -> Tensor:
        """Return what one block, or, for -1, the stem, makes of a batch."""
        if number < 0:
            return self.parts.run_stem(self.model, x)
        return self.parts.run_blocks(self.model, x, number, number + 1)

    def leave(self, x: Tensor, stop: int, model: nn.Module) -> Tensor:
        """Return the logits for the hidden tensor after so many blocks."""
        if str(stop) in self.exits:
            x = self.exits[str(stop)](x)
            if not self.links:
                return x
        elif stop < len(self.parts.blocks):
            x = skip_link(x, self.shapes[-1])
        return self.parts.run_head(model, x)


class Frozen(nn.Module):
    """One part of a model as a module of its own, to learn what running it costs."""

    def __init__(self, whole: nn.Module, number: int) -> None:
        super().__init__()
        self.whole, self.number = whole, number

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block, or, for -1, the stem, makes of a batch."""
        whole: Any = self.whole
        return whole.part(x, self.number)  # type: ignore[no-any-return]
