"""The first blocks: the base of methods whose devices hold a model up to some depth.

A model has exits after some of its blocks (`exits`); depth d ends with exit d. Blocks behind it do
not exist on a device of depth d: they are neither sent nor built. Tensors have the same name on the
server whatever the depth of the model that they are in, so what is common is merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Plan, Submodel
from sizewise.exchange.state import State
from sizewise.exchange.view import TensorSlice, View
from sizewise.families.base import Method
from sizewise.families.exits import stage_ends, with_exits
from sizewise.families.options import AssignedOptions, possible
from sizewise.families.submodels import Submodels
from sizewise.fleet.devices import Device
from sizewise.memory.packing import largest_fitting
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task


@dataclass(frozen=True)
class Depth(Submodel):
    """The first blocks of the model.

    Attributes:
        stops: The number of blocks before each exit that it has, ascending; it ends with the last.
        label: What people call it, and the server what it keeps for it alone.
    """

    stops: tuple[int, ...]
    label: str = ""

    @property
    def shape_key(self) -> "Depth":
        """Shapes do not depend on the label."""
        return Depth(self.stops)

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return self.stops[-1]


class DepthSubmodels(Submodels):
    """Models that end after some blocks."""

    def build(self, submodel: Depth) -> nn.Module:
        """Build the blocks and the exits of a submodel."""
        return with_exits(self.task, submodel.stops)

    def slices(self, submodel: Depth) -> View:
        """Return where a submodel's tensors live: under the same names, whatever its depth."""
        first = self.task.first_names
        return {
            name: TensorSlice(first.get(name.removeprefix("model."), name))
            for name in own_tensors(self.module(submodel))
        }


@dataclass(frozen=True)
class Depths:
    """What the server notes: the depths that some device trains, ascending."""

    depths: tuple[int, ...]


class Prefixwise(Method):
    """FedAvg on models of several depths."""

    submodel_type: type[Depth] = Depth

    @dataclass(frozen=True)
    class Options(AssignedOptions):
        """Options of all methods with depths.

        Attributes:
            exits: The number of blocks before each exit; the model's end is always one. Default:
                the ends of its stages, or four places where it has none.
        """

        exits: tuple[int, ...] = ()

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        if task.recipe.eval_memory is not None:
            raise ConfigError(
                f"{type(self).__name__.lower()} runs exits of its own, which recipe.eval_memory "
                "cannot; leave it out"
            )

    @cached_property
    def submodels(self) -> Submodels:
        """Models that end after some blocks."""
        return DepthSubmodels(self.task)

    # ---- depths

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The number of blocks before each exit, ascending: that of depth 1, of depth 2, ..."""
        last = len(self.task.parts.blocks)
        for stop in self.options.exits:
            if not 0 <= stop <= last:
                raise ConfigError(f"method.exits must be after 0 to {last} blocks, not {stop}")
        return tuple(sorted({*(self.options.exits or stage_ends(self.task.hidden_shapes)), last}))

    def single(self, depth: int) -> Depth:
        """Return the submodel of a depth with its last exit alone."""
        return Depth((self.stops[depth - 1],), f"exit {depth}")

    def trainee(self, depth: int) -> Depth:
        """Return what a device of a depth trains."""
        return self.single(depth)

    @cached_property
    def main(self) -> Depth:
        """The whole model."""
        return self.trainee(len(self.stops))

    # ---- who trains what

    def depth(self, device: Device) -> int:
        """Return the depth that a device trains."""
        return self.deepest(self.options.capacity(device))

    def deepest(self, capacity: float | None) -> int:
        """Return the largest depth for a capacity; raise BudgetTooSmall if no depth fits.

        A ratio covers a share of all depths.
        """
        count = len(self.stops)
        if self.options.assign == "ratio" and capacity is not None:
            return max(1, int(min(capacity, 1.0) * count + 1e-9))

        def bytes_of(depth: int) -> int:
            return self.levers.least(self.trainee(depth))

        # A shallow model may need more than a deeper one: its exit has weights of its own.
        depths = range(1, count + 1)
        found = largest_fitting(depths, bytes_of, capacity, ascending=False)
        if found is None:
            needed = min(map(bytes_of, depths))
            what = "one training step of the cheapest depth"
            raise BudgetTooSmall(int(capacity or 0), needed, what)
        return found

    def depths(self) -> list[int]:
        """Return the depths that some device of the fleet trains, ascending."""
        return sorted(set(possible(self.deepest, self.options.capacities(self.task)))) or [1]

    def trained(self) -> Sequence[Submodel]:
        """Return what devices of each depth train."""
        return [self.trainee(depth) for depth in self.depths()]

    def setup(self) -> State:
        """Return the model with all exits that are trained, and which depths devices train."""
        return super().setup().noting(Depths(tuple(self.depths())))

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device as many blocks as it can hold."""
        return self.offer(device, round_index, self.trainee(self.depth(device)))

    def sizes(self, state: State) -> Sequence[Depth]:
        """Return what devices of each depth train."""
        return [self.trainee(depth) for depth in state.facts(Depths).depths]
