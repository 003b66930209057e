"""Devices with different models that share their ends.

All models have the same stem and head, and these are what the server averages. What lies between
them, a device keeps to itself from round to round. A device has the model that its group names
(`fleet.group.model`); else the costliest of `models` that fits its bytes.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Submodel, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, View, cut, whole
from sizewise.families.base import Method
from sizewise.families.own_models import Holdings, OwnModels
from sizewise.families.submodels import Submodels
from sizewise.fleet.devices import Device
from sizewise.memory.packing import largest_fitting
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

ENDS = ("stem", "head")


@dataclass(frozen=True)
class Architecture(Submodel):
    """A device's model, by its name."""

    model: str

    @property
    def label(self) -> str:
        """What people call it."""
        return self.model


class Different(Submodels):
    """Models of different architectures; if they aggregate, the server has the ends of all."""

    def __init__(self, task: Task, aggregate: bool) -> None:
        super().__init__(task)
        self.aggregate = aggregate
        self._tasks: dict[str, Task] = {}

    def task_of(self, submodel: Any) -> Task:
        """Return the task with an architecture's model."""
        name: str = submodel.model
        if name not in self._tasks:
            self._tasks[name] = self.task.named(name)
        return self._tasks[name]

    def build(self, submodel: Any) -> nn.Module:
        """Build a fresh model of an architecture."""
        return self.task_of(submodel).build()

    def slices(self, submodel: Any) -> View:
        """Return the stem and the head; nothing if devices keep theirs."""
        parts = self.task_of(submodel).parts.in_turn("sharing a stem and a head")
        own = own_tensors(self.pattern(submodel))
        ends = [name for name in own if parts.part_of(name) in ENDS]
        return whole(ends if self.aggregate else [])

    def parameters(self, state: State, main: Submodel) -> list[str]:
        """Return the names of the parameters of stem and head."""
        named = dict(self.pattern(main).named_parameters())
        return [name for name in state.tensors if name in named]

    def described(self, submodel: Architecture) -> dict[str, str]:
        """Return the shapes of what all models must have in common, for people."""
        task, own = self.task_of(submodel), own_tensors(self.pattern(submodel))
        shapes = {name: t.shape for name, t in own.items() if task.parts.part_of(name) in ENDS}
        first, *_, last = task.hidden_shapes[0], task.hidden_shapes[-1]
        shapes |= {"what the stem gives": first, "what the head takes": last}
        return {name: str(tuple(shape)) for name, shape in shapes.items()}


class Architectures(OwnModels):
    """FedAvg of the stem and the head of different models."""

    own_models = True
    submodel_type: type[Architecture] = Architecture

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of methods whose devices have different models.

        Attributes:
            models: Models to choose from by bytes; default: that of the config.
            aggregate: Whether devices share their stem and head, or keep all to themselves.
        """

        models: tuple[str, ...] = ()
        aggregate: bool = True

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        if task.recipe.norm in ("per_width_stats", "per_submodel"):
            raise ConfigError(
                f"recipe.norm = {task.recipe.norm!r} is for submodels of one model, and devices "
                f"have different ones here; use 'batch', 'sbn' or 'tracked'"
            )
        if task.model.weights is not None:
            raise ConfigError(
                "model.weights are of one model, and devices have different ones here; leave it "
                "out, and give a built model as a class or function"
            )

    @cached_property
    def submodels(self) -> Different:
        """Models of different architectures."""
        return Different(self.task, self.options.aggregate)

    @cached_property
    def main(self) -> Architecture:
        """The model whose stem and head the server begins with."""
        return Architecture(self.task.model.name)

    # ---- who gets which

    def stage(self, round_index: int) -> TrainingStage:
        """Return the costliest stage of a device."""
        return self.task.stage(round_index)

    @cached_property
    def choices(self) -> list[tuple[int, str]]:
        """The models that are given out by bytes, with what they need, ascending."""
        names = dict.fromkeys(self.options.models or (self.task.model.name,))
        return sorted(
            (self.levers.least(Architecture(name), self.stage(0)), name) for name in names
        )

    def chosen(self, device: Device) -> Architecture:
        """Return a device's model; raise BudgetTooSmall if it can hold none."""
        if device.model is not None:
            return Architecture(device.model)
        found = largest_fitting(self.choices, lambda choice: choice[0], device.memory)
        if found is None:
            needed, name = self.choices[0]
            raise BudgetTooSmall(device.memory or 0, needed, f"one training step of {name}")
        return Architecture(found[1])

    # ---- the server

    def setup(self) -> State:
        """Return the stem and the head, if all models have the same."""
        expected = self.submodels.described(self.main)
        for name in dict.fromkeys((*self.options.models, *self.task.models)):
            found = self.submodels.described(Architecture(name))
            for tensor in sorted(expected.keys() | found.keys()):
                ours, theirs = expected.get(tensor, "none"), found.get(tensor, "none")
                if ours != theirs:
                    raise ConfigError(
                        f"all models need the same stem and head, but {tensor} has shape {theirs} "
                        f"in {name!r} and {ours} in {self.main.label!r}; choose others"
                    )
        fresh = own_tensors(self.submodels.pattern(self.main))
        ends = self.submodels.view(self.main)
        state = State({name: fresh[name].detach().clone() for name in ends})
        return state.noting(Holdings({}))

    # ---- the device

    def start(self, submodel: Submodel, received: Tensors, device_state: Tensors) -> Tensors:
        """Return what a device's model starts from: its own layers, fresh ones at first.

        A device that was upgraded may remember layers of another model, which do not help.
        """
        own, ends = own_tensors(self.submodels.pattern(submodel)), self.submodels.view(submodel)
        copy = self.submodels.copy(submodel)
        learned = copy.trained_names([copy.actual(self.task.stage())])
        shapes = {name: own[name].shape for name in learned if name not in ends}
        if {name: tensor.shape for name, tensor in device_state.items()} != shapes:
            device_state = {}
        return {**own, **device_state, **{name: received[name] for name in ends}}

    def parted(self, update: Update) -> Update:
        """Return an update that sends the ends; the other layers stay with the device."""
        sent, trained = self.submodels.view(update.plan.submodel), update.tensors
        return replace(
            update,
            tensors={name: tensor for name, tensor in trained.items() if name in sent},
            device_state={name: tensor for name, tensor in trained.items() if name not in sent},
        )

    # ---- what people run

    def own_model(self, state: State, submodel: Any, device_state: Tensors) -> nn.Module:
        """Return a device's model: the server's ends around its own layers."""
        received = cut(state.tensors, self.submodels.view(submodel))
        return self.submodels.copy(submodel).load(self.start(submodel, received, device_state))
