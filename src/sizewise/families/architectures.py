"""Devices with different models that share their ends: the base of FedIN.

All models have the same stem and head, and these are what the server averages. What lies between
them, a device keeps to itself from round to round. A device has the model that its group names
(`fleet.group.model`); else the costliest of `models` that fits its bytes.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Size, nn

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Submodel, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, View, cut, whole
from sizewise.families.base import Method
from sizewise.fleet.devices import Device
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.blockwise import hidden_shapes
from sizewise.training import loop
from sizewise.training.task import Task

ENDS = ("stem", "head")


class Architectures(Method):
    """FedAvg of the stem and the head of different models."""

    own_models = True

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of methods whose devices have different models.

        Attributes:
            models: Models to choose from by bytes; default: that of the config.
            aggregate: Whether devices share their stem and head, or keep all to themselves.
        """

        models: tuple[str, ...] = ()
        aggregate: bool = True

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        if task.recipe.norm in ("per_width_stats", "per_submodel"):
            raise ConfigError(
                f"recipe.norm = {task.recipe.norm!r} is for pieces of one model, and devices have "
                f"different ones here; use 'batch', 'sbn' or 'tracked'"
            )
        if task.model.weights is not None:
            raise ConfigError(
                "model.weights are of one model, and devices have different ones here; leave it out"
            )
        self._splits: dict[str, Anatomy] = {}

    # ---- models

    def piece(self, name: str) -> Submodel:
        """Return the piece of a device with this model."""
        return Submodel(name, {"model": name})

    @cached_property
    def main(self) -> Submodel:
        """The model whose stem and head the server begins with."""
        return self.piece(self.task.model.name)

    def build(self, piece: Submodel) -> nn.Module:
        """Build a fresh model of a piece's architecture."""
        return self.task.named(piece.size).build()

    def split(self, name: str) -> Anatomy:
        """Return where a model's stem, blocks and head are."""
        if name not in self._splits:
            self._splits[name] = self.task.named(name).anatomy(self.pattern(self.piece(name)))
        return self._splits[name]

    def between(self, name: str) -> tuple[Size, Size]:
        """Return the shapes of a sample's hidden tensors after the stem and before the head."""
        model = self.build(self.piece(name)).eval()
        shapes = hidden_shapes(model, self.split(name), self.task.drawn(2))
        return shapes[0], shapes[-1]

    def view(self, piece: Submodel) -> View:
        """Return the stem and the head; nothing if devices keep theirs."""
        if piece.size not in self._views:
            split, own = self.split(piece.size), loop.own_tensors(self.pattern(piece))
            ends = [name for name in own if split.part_of(name) in ENDS]
            self._views[piece.size] = whole(ends if self.options.aggregate else [])
        return self._views[piece.size]

    # ---- who gets which

    def stage(self, name: str, round_index: int) -> TrainingStage:
        """Return the costliest stage of a device with this model."""
        (stage,) = self.stages(round_index)
        return stage

    @cached_property
    def choices(self) -> list[tuple[int, str]]:
        """The models that are given out by bytes, with what they need, ascending."""
        names = dict.fromkeys(self.options.models or (self.task.model.name,))
        return sorted((self.footprint(self.piece(n), self.stage(n, 0)).peak, n) for n in names)

    def chosen(self, device: Device) -> str:
        """Return the name of a device's model; raise BudgetTooSmall if it can hold none."""
        if device.model is not None:
            return device.model
        if device.memory is None:
            return self.choices[-1][1]
        fitting = bisect_right(self.choices, device.memory, key=lambda choice: choice[0])
        if fitting == 0:
            needed, name = self.choices[0]
            raise BudgetTooSmall(device.memory, needed, f"one training step of {name}")
        return self.choices[fitting - 1][1]

    # ---- the server

    def setup(self) -> State:
        """Return the stem and the head, if all models have the same."""
        expected = self._ends(self.main)
        for name in dict.fromkeys((*self.options.models, *self.task.models)):
            found = self._ends(self.piece(name))
            for tensor in sorted(expected.keys() | found.keys()):
                ours, theirs = expected.get(tensor, "none"), found.get(tensor, "none")
                if ours != theirs:
                    raise ConfigError(
                        f"all models need the same stem and head, but {tensor} has shape {theirs} "
                        f"in {name!r} and {ours} in {self.main.size!r}; choose others"
                    )
        fresh = loop.own_tensors(self.pattern(self.main))
        tensors = {name: fresh[name].detach().clone() for name in self.view(self.main)}
        return State(tensors, extras={"models": {}})

    def _ends(self, piece: Submodel) -> dict[str, str]:
        """Return the shapes of what all models must have in common, for people."""
        own, (first, last) = loop.own_tensors(self.pattern(piece)), self.between(piece.size)
        split = self.split(piece.size)
        shapes = {name: t.shape for name, t in own.items() if split.part_of(name) in ENDS}
        shapes |= {"what the stem gives": first, "what the head takes": last}
        return {name: str(tuple(shape)) for name, shape in shapes.items()}

    def parameters(self, state: State) -> list[str]:
        """Return the names of the parameters of stem and head."""
        named = dict(self.pattern(self.main).named_parameters())
        return [name for name in state.tensors if name in named]

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the mean of the ends, and who has which model."""
        models = dict(state.extras["models"])

        def noted() -> Iterator[Update]:
            for update in updates:
                models[str(update.plan.device)] = update.plan.piece.size
                yield update

        merged = super().merge(state, noted())
        return replace(merged, extras={**merged.extras, "models": models})

    # ---- the device

    def start(self, piece: Submodel, received: Tensors, memory: Tensors) -> Tensors:
        """Return what a device's model starts from: its own layers, fresh ones at first.

        A device that was upgraded may remember layers of another model, which do not help.
        """
        own, ends = loop.own_tensors(self.pattern(piece)), self.view(piece)
        copy = self.copy(piece)
        learned = copy.trained_names([copy.actual(stage) for stage in self.stages(0)])
        shapes = {name: own[name].shape for name in learned if name not in ends}
        if {name: tensor.shape for name, tensor in memory.items()} != shapes:
            memory = {}
        return {**own, **memory, **{name: received[name] for name in ends}}

    def parted(self, update: Update) -> Update:
        """Return an update that sends the ends; the other layers stay with the device."""
        sent, trained = self.view(update.plan.piece), update.tensors
        return replace(
            update,
            tensors={name: tensor for name, tensor in trained.items() if name in sent},
            memory={name: tensor for name, tensor in trained.items() if name not in sent},
        )

    # ---- what people run

    def deploy(self, state: State) -> dict[str, Callable[[], nn.Module]]:
        """Return every device's own model; before any has trained, that of the config."""
        models: Mapping[str, str] = state.extras["models"]
        if not models:
            return {self.main.size: partial(self._model, state, self.main, None)}
        return {
            size: partial(self._model, state, self.piece(models[str(number)]), number)
            for size, number in self.owners(state).items()
        }

    def owners(self, state: State) -> dict[str, int]:
        """Return whose model each is."""
        models: Mapping[str, str] = state.extras["models"]
        return {f"device {n} ({models[n]})": int(n) for n in sorted(models, key=int)}

    def _model(self, state: State, piece: Submodel, number: int | None) -> nn.Module:
        memory = {} if number is None else state.devices.get(number, {})
        received = cut(state.tensors, self.view(piece))
        return self.copy(piece).load(self.start(piece, received, memory))

    def headline(self, sizes: Mapping[str, float]) -> float:
        """Return the mean accuracy over the devices."""
        return sum(sizes.values()) / len(sizes)
