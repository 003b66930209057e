"""Narrower copies: the base of the methods whose devices train some channels of the model.

The server's model is traced once (`channels`). A device's width is the largest that fits its bytes;
its submodel is the model cut to that width, any `nn.Module` of it. Which channels a submodel keeps
is the method's `rule`: the first ones here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import nn

from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import Channels, Kept
from sizewise.cutting.selection import Rule
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Plan, Submodel
from sizewise.exchange.state import State
from sizewise.exchange.view import View
from sizewise.families.base import Method
from sizewise.families.options import AssignedOptions, possible
from sizewise.families.submodels import Submodels, Width
from sizewise.fleet.devices import Device
from sizewise.memory.packing import largest_fitting
from sizewise.surgery import norms
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

STEPS = 16
"""Where no widths are given, a device's is a multiple of one part in so many."""


class WidthSubmodels(Submodels):
    """The model, cut to some of its channels.

    A group's number of them is rounded as in `widths.scaled`; a submodel's rule says which.
    """

    def __init__(
        self,
        task: Task,
        rounding: str = "ceil",
        rule: Callable[[Any], Rule] = lambda submodel: selection.prefix,
    ) -> None:
        super().__init__(task)
        self.rounding, self.rule = rounding, rule

    def kept(self, submodel: Any) -> Kept | None:
        """Return the channels that a submodel keeps of each group; None if it is the whole."""
        if submodel.width == 1:
            return None
        rule = self.rule(submodel)
        return selection.keep(self.task.channels, submodel.width, rule, self.rounding)

    def traced(self, submodels: Iterable[Submodel]) -> Channels:
        """Return the channels that submodels are cut from."""
        return self.task.channels

    def build(self, submodel: Any) -> nn.Module:
        """Build a model of a submodel's shapes, cut from a fresh full one."""
        full, kept = self.task.build(), self.kept(submodel)
        return full if kept is None else shrinking.shrink(full, self.task.channels, kept)

    def slices(self, submodel: Any) -> View:
        """Return which channels of the server's tensors a submodel consists of."""
        kept = self.kept(submodel)
        if kept is None:
            return super().slices(submodel)
        places = shrinking.view(self.task.channels, kept)
        own = own_tensors(self.module(submodel))
        return self.separate({name: places[name] for name in own}, submodel)


@dataclass(frozen=True)
class Widths:
    """What the server notes: the widths that some device trains, ascending."""

    widths: tuple[float, ...]


class Widthwise(Method):
    """FedAvg on narrower copies of one model."""

    submodel_type: type[Width] = Width

    @dataclass(frozen=True)
    class Options(AssignedOptions):
        """Options of all methods that cut by width.

        Attributes:
            widths: The ratios of channels that submodels may have; empty: all multiples of 1/16.
            rounding: How a layer's number of channels is rounded; `floor_min1` keeps at least one.
        """

        widths: tuple[float, ...] = ()
        rounding: Literal["ceil", "floor", "floor_min1"] = "ceil"

        def __post_init__(self) -> None:
            if not all(0 < width <= 1 for width in self.widths):
                raise ConfigError(f"method.widths must all be in (0, 1], not {list(self.widths)}")

    options: Options

    @cached_property
    def submodels(self) -> WidthSubmodels:
        """Narrower copies, by the method's rule."""
        return WidthSubmodels(self.task, self.options.rounding, self.rule)

    def rule(self, submodel: Any) -> Rule:
        """Return which channels a submodel keeps."""
        return selection.prefix

    # ---- widths

    @cached_property
    def widths(self) -> tuple[float, ...]:
        """The widths that submodels may have, in ascending order."""
        chosen = set(self.options.widths)
        if self.options.assign == "ratio":
            chosen = {min(ratio, 1.0) for ratio in self.task.ratios}
        return tuple(sorted(chosen)) or self._every_width()

    def _every_width(self) -> tuple[float, ...]:
        """Return all multiples of 1/16 that leave every group some channels."""
        smallest = min((group.size for group in self.task.channels.groups), default=1)
        least = 1 / smallest if self.options.rounding == "floor" else 0.0
        return tuple(s / STEPS for s in range(1, STEPS + 1) if s / STEPS >= least - 1e-9)

    def width(self, device: Device, round_index: int) -> float:
        """Return the width that a device trains in a round."""
        return self.widest(self.options.capacity(device))

    def widest(self, capacity: float | None) -> float:
        """Return the largest width for a capacity; raise BudgetTooSmall if no width fits."""
        if self.options.assign == "ratio" and capacity is not None:
            return min(capacity, 1.0)
        found = largest_fitting(self.widths, lambda w: self.levers.least(self.trainee(w)), capacity)
        if found is None:
            least = self.widths[0]
            needed = self.levers.least(self.trainee(least))
            raise BudgetTooSmall(int(capacity or 0), needed, f"training at width {least:g}")
        return found

    def fitting(self) -> list[float]:
        """Return the widths that some device of the fleet trains, in ascending order."""
        found = possible(self.widest, self.options.capacities(self.task))
        return sorted(set(found)) or [self.widths[-1]]

    # ---- submodels

    def narrow(self, width: float) -> Width:
        """Return the submodel of a width."""
        return self.submodel_type(width)

    def trainee(self, width: float) -> Width:
        """Return what a device of a width trains; its bytes decide who gets it."""
        return self.narrow(width)

    def trained(self) -> Sequence[Submodel]:
        """Return a submodel for each width that devices train."""
        return [self.narrow(width) for width in self.fitting()]

    def setup(self) -> State:
        """Return the full model, and for each width the tensors that are kept apart for it."""
        return super().setup().noting(Widths(tuple(self.fitting())))

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device a submodel as wide as it can hold."""
        chosen = self.choose(self.width(device, round_index), device, round_index)
        return self.offer(device, round_index, chosen)

    def choose(self, width: float, device: Device, round_index: int) -> Width:
        """Return a device's submodel of a width, with what its rule needs to know."""
        return self.trainee(width)

    def sizes(self, state: State) -> Sequence[Submodel]:
        """Return a submodel for each width that devices train."""
        return [self.narrow(width) for width in state.facts(Widths).widths]


class Shifting(Widthwise):
    """Base of methods whose submodels keep other channels each time: all are trained in turn.

    Only the full model is deployed.
    """

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        norms.refuse_apart(task.recipe.norm, type(self).__name__.lower())

    def choose(self, width: float, device: Device, round_index: int) -> Width:
        """Return the submodel of a width that is due; the whole model is always the same."""
        return self.main if width == 1 else self.due(width, device, round_index)

    def due(self, width: float, device: Device, round_index: int) -> Width:
        """Return the submodel of a width that a device trains in a round."""
        raise NotImplementedError

    @cached_property
    def main(self) -> Width:
        """The full model."""
        return self.submodel_type()

    def sizes(self, state: State) -> Sequence[Submodel]:
        """Return the full model."""
        return (self.main,)
