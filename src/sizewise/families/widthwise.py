"""Narrower copies: the base of the methods whose devices train some channels of the model.

The server's model is traced once (`channels`). A device's width is the largest that fits its bytes;
its piece is the model cut to that width, any `nn.Module` of it. Which channels a piece keeps is the
method's `rule`: the first ones here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from sizewise.common.widths import named
from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import Channels, Kept
from sizewise.cutting.selection import Rule
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Submodel, Plan
from sizewise.exchange.state import State
from sizewise.exchange.view import TensorSlice, View
from sizewise.families.base import Method
from sizewise.fleet.devices import Device, ratio_of
from sizewise.memory.packing import largest_ratio
from sizewise.surgery import norms
from sizewise.training import loop
from sizewise.training.task import Task

STEPS = 16
"""Where no widths are given, a device's is a multiple of one part in so many."""

CACHED_VIEWS = 64


class Widthwise(Method):
    """FedAvg on narrower copies of one model."""

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of all methods that cut by width.

        Attributes:
            widths: The ratios of channels that pieces may have; empty: all multiples of 1/16.
            rounding: How a group's number of channels is rounded; see `widths.scaled`.
            assign: Whether a device gets the largest width that fits its bytes; or, to reproduce
                papers, its ratio as the fleet gives it, whatever that costs.
        """

        widths: tuple[float, ...] = ()
        rounding: Literal["ceil", "floor", "floor_min1"] = "ceil"
        assign: Literal["bytes", "ratio"] = "bytes"

        def __post_init__(self) -> None:
            if not all(0 < width <= 1 for width in self.widths):
                raise ConfigError(f"method.widths must all be in (0, 1], not {list(self.widths)}")

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self.ignores_budgets = self.options.assign == "ratio"

    # ---- widths

    @cached_property
    def widths(self) -> tuple[float, ...]:
        """The widths that pieces may have, in ascending order."""
        chosen = set(self.options.widths)
        if self.options.assign == "ratio":
            chosen = {min(ratio, 1.0) for ratio in self.task.ratios}
        return tuple(sorted(chosen)) or self._every_width()

    def _every_width(self) -> tuple[float, ...]:
        """Return all multiples of 1/16 that leave every group some channels."""
        smallest = min((group.size for group in self.channels.groups), default=1)
        least = 1 / smallest if self.options.rounding == "floor" else 0.0
        return tuple(s / STEPS for s in range(1, STEPS + 1) if s / STEPS >= least - 1e-9)

    def width(self, device: Device, round_index: int) -> float:
        """Return the width that a device trains in a round."""
        if self.options.assign == "bytes":
            return self.widest(device.memory)
        return min(ratio_of(device), 1.0)

    def widest(self, memory: int | None) -> float:
        """Return the largest width that fits a budget; raise BudgetTooSmall if none does."""
        if memory is None:
            return self.widths[-1]
        (stage,) = self.stages(0)
        return largest_ratio(
            lambda width: self.footprint(self.trainee(width), stage).peak, memory, self.widths
        )

    def fitting(self) -> list[float]:
        """Return the widths that some device of the fleet trains, in ascending order."""
        if self.options.assign == "ratio":
            return list(self.widths)
        found = set()
        for memory in self.task.budgets:
            try:
                found.add(self.widest(memory))
            except BudgetTooSmall:
                continue  # Such a device is refused, and named, in the rounds that ask it.
        return sorted(found) or [self.widths[-1]]

    # ---- pieces

    def piece(self, width: float) -> Submodel:
        """Return the piece of a width; the whole model is FedAvg's."""
        return self.main if width == 1 else Submodel(f"width {named(width)}", {"width": width})

    def trainee(self, width: float) -> Submodel:
        """Return what a device of a width trains; its bytes decide who gets it."""
        return self.piece(width)

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device a piece as wide as it can hold."""
        piece = self.choose(self.width(device, round_index), device, round_index)
        plan = Plan(device.id, round_index, device.group, piece, self.stages(round_index))
        return self.affordable(plan, device)

    def choose(self, width: float, device: Device, round_index: int) -> Submodel:
        """Return a device's piece of a width: what its rule needs to know goes into its cut."""
        return self.trainee(width)

    def rule(self, piece: Submodel) -> Rule:
        """Return which channels a piece keeps."""
        return selection.prefix

    @property
    def channels(self) -> Channels:
        """What hangs together in the server's model."""
        return self.task.channels

    @cached_property
    def traced(self) -> Channels:
        """What pieces are cut from."""
        return self.channels

    def kept(self, piece: Submodel) -> Kept | None:
        """Return the channels that a piece keeps of each group; None if it is the whole model."""
        return self._chosen(piece) if "width" in piece.cut else None

    def _chosen(self, piece: Submodel) -> Kept:
        width = piece.cut["width"]
        return selection.keep(self.channels, width, self.rule(piece), self.options.rounding)

    def cuts(self) -> Sequence[Submodel]:
        """Return the narrowest and the widest piece that devices train."""
        widths = [width for width in self.fitting() if width < 1]
        return [self.piece(width) for width in (*widths[:1], *widths[-1:])]

    def build(self, piece: Submodel) -> nn.Module:
        """Build a model of a piece's shapes, cut from a fresh full one."""
        full = self.task.build()
        if "width" not in piece.cut:
            return full
        return shrinking.shrink(full, self.channels, self._chosen(piece))

    def view(self, piece: Submodel) -> View:
        """Return which channels of the server's tensors a piece consists of."""
        if "width" not in piece.cut:
            return super().view(piece)
        key = json.dumps([piece.size, dict(piece.cut)])
        if key not in self._views:
            if len(self._views) >= CACHED_VIEWS:  # Rolling and random pieces come and go.
                self._views.clear()
            module = self.module(piece)
            slots = shrinking.view(self.channels, self._chosen(piece))
            own: dict[str, TensorSlice] = {name: slots[name] for name in loop.own_tensors(module)}
            apart = norms.kept_apart(module, self.task.recipe.norm)
            self._views[key] = norms.separate(own, apart, piece.size)
        return self._views[key]

    # ---- the server

    def setup(self) -> State:
        """Return the full model, and for each width the tensors that are kept apart for it."""
        widths = self.fitting()
        state = self.extended(super().setup(), map(self.piece, widths))
        return replace(state, extras={**state.extras, "widths": widths})

    def pieces(self, state: State) -> Sequence[Submodel]:
        """Return a piece for each width that devices train."""
        return [self.piece(width) for width in state.extras["widths"]]


class Shifting(Widthwise):
    """Base of methods whose pieces keep other channels each time, so that all are trained in turn.

    Only the full model is deployed.
    """

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        norms.refuse_apart(task.recipe.norm, type(self).__name__.lower())

    def choose(self, width: float, device: Device, round_index: int) -> Submodel:
        """Return the piece of a width that is due; the whole model is always the same."""
        piece = self.piece(width)
        if piece == self.main:
            return piece
        return Submodel(piece.size, {**piece.cut, **self.due(device, round_index)})

    def due(self, device: Device, round_index: int) -> dict[str, Any]:
        """Return what the rule needs to know to choose the channels of a device in a round."""
        raise NotImplementedError

    def pieces(self, state: State) -> Sequence[Submodel]:
        """Return the full model."""
        return (self.main,)
