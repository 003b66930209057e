"""The first blocks: the base of methods whose devices hold a model up to some depth.

A model has exits after some of its blocks (`exits`); depth d ends with exit d. Blocks behind it do
not exist on a device of depth d: they are neither sent nor built. Tensors have the same name on the
server whatever the depth of the model that they are in, so what is common is merged.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Submodel, Plan
from sizewise.exchange.state import State
from sizewise.exchange.view import TensorSlice, View
from sizewise.families.base import Method
from sizewise.families.exits import stage_ends, with_exits
from sizewise.fleet.devices import Device, ratio_of
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task


class Prefixwise(Method):
    """FedAvg on models of several depths."""

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of all methods with depths.

        Attributes:
            exits: The number of blocks before each exit; the model's end is always one. Default:
                the ends of its stages, or four places where it has none.
            assign: Whether a device gets the largest depth that fits its bytes; or, to reproduce
                papers, the largest share of all depths that its ratio covers.
        """

        exits: tuple[int, ...] = ()
        assign: Literal["bytes", "ratio"] = "bytes"

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        if task.recipe.eval_memory is not None:
            raise ConfigError(
                f"{type(self).__name__.lower()} runs exits of its own, which recipe.eval_memory "
                "cannot; leave it out"
            )
        self.ignores_budgets = self.options.assign == "ratio"

    # ---- the model and its exits

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The number of blocks before each exit, ascending: that of depth 1, of depth 2, ..."""
        last = len(self.parts.blocks)
        for stop in self.options.exits:
            if not 0 <= stop <= last:
                raise ConfigError(f"method.exits must be after 0 to {last} blocks, not {stop}")
        return tuple(sorted({*(self.options.exits or stage_ends(self.shapes)), last}))

    def single(self, depth: int) -> Submodel:
        """Return the piece of a depth with its last exit alone."""
        return Submodel(f"exit {depth}", {"exits": [self.stops[depth - 1]]})

    def trainee(self, depth: int) -> Submodel:
        """Return what a device of a depth trains."""
        return self.single(depth)

    @cached_property
    def main(self) -> Submodel:
        """The whole model."""
        return self.trainee(len(self.stops))

    def build(self, piece: Submodel) -> nn.Module:
        """Build the blocks and the exits of a piece."""
        return with_exits(self.task, self.parts, self.shapes, piece.cut["exits"])

    def view(self, piece: Submodel) -> View:
        """Return where a piece's tensors live: under the same names, whatever its depth."""
        if piece.size not in self._views:
            self._views[piece.size] = {
                name: TensorSlice(self.first_names.get(name.removeprefix("model."), name))
                for name in own_tensors(self.module(piece))
            }
        return self._views[piece.size]

    # ---- who trains what

    def depth(self, device: Device) -> int:
        """Return the depth that a device trains."""
        if self.options.assign == "ratio":
            return self._covered(ratio_of(device))
        return self.deepest(device.memory)

    def _covered(self, ratio: float) -> int:
        return max(1, int(min(ratio, 1.0) * len(self.stops) + 1e-9))

    def deepest(self, memory: int | None) -> int:
        """Return the largest depth that fits a budget; raise BudgetTooSmall if none does."""
        if memory is None:
            return len(self.stops)
        (stage,) = self.stages(0)
        peaks = []
        for depth in range(len(self.stops), 0, -1):
            peaks.append(self.footprint(self.trainee(depth), stage).peak)
            if peaks[-1] <= memory:
                return depth
        raise BudgetTooSmall(memory, min(peaks), "one training step of the cheapest depth")

    def depths(self) -> list[int]:
        """Return the depths that some device of the fleet trains, ascending."""
        if self.options.assign == "ratio":
            return sorted({self._covered(ratio) for ratio in self.task.ratios}) or [1]
        found = set()
        for memory in self.task.budgets:
            # A device without any is refused, and named, in the rounds that ask it.
            with suppress(BudgetTooSmall):
                found.add(self.deepest(memory))
        return sorted(found) or [1]

    def setup(self) -> State:
        """Return the model with all exits that are trained, and which depths devices train."""
        depths = self.depths()
        state = self.extended(super().setup(), map(self.trainee, depths))
        return replace(state, extras={**state.extras, "depths": depths})

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device as many blocks as it can hold."""
        piece = self.trainee(self.depth(device))
        plan = Plan(device.id, round_index, device.group, piece, self.stages(round_index))
        return self.affordable(plan, device)

    def pieces(self, state: State) -> Sequence[Submodel]:
        """Return what devices of each depth train."""
        return [self.trainee(depth) for depth in state.extras["depths"]]
