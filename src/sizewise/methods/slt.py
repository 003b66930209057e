"""SLT: layers are trained one after the other at full width; what follows is a narrow head.

Pfeiffer, Khalili, Henkel: "Aggregating Capacity in FL through Successive Layer Training for
Computationally-Constrained Devices", NeurIPS 2023 (https://arxiv.org/abs/2305.17005).

    step n:    layers 1..n-1 are frozen; layer n learns at full width; layers n+1..K at width s_n
    device:    E epochs of SGD on all that is not frozen; frozen layers keep no activations
    server:    each entry of w <- mean over the devices that trained it; others stay
    widths:    s_0 = s_1 <= s_2 <= ... <= s_N = 1, the largest that fit the smallest budget

Step 0, pre-training, trains the whole net at width s_1. A layer is what adds a group of channels of
its own: a convolution with its norm; projections belong to the layer whose sum they join. Where the
width drops inside a residual stream, the first channels of the shortcut are kept. `rounds` says how
rounds are divided among the steps. A device with more bytes freezes fewer layers; it never changes
s_n. `depth` trains that many full layers at a time (Appendix B: a narrower head in exchange).

Frozen layers are neither sent nor counted; the public code averages in the copies of devices that
froze them. `early_stop` looks at the devices' training loss, as a server has no test set.

Deployed are the full model and, last, the current configuration, which people run until the end.

Discloses: the trained weights of each device, to the server.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from sizewise import accounting, cutting, indices, norms, training
from sizewise.channels import Channels, trace
from sizewise.errors import BudgetTooSmall, ConfigError, ModelError
from sizewise.fleet import Device, ratio_of
from sizewise.method import Method
from sizewise.plan import Piece, Plan, Update
from sizewise.state import State
from sizewise.task import Task
from sizewise.view import View


class SLT(Method):
    """Successive layer training."""

    @dataclass(frozen=True)
    class Options:
        """Options of SLT.

        Attributes:
            rounds: How long steps last: in proportion to the parameters that they add; the public
                code's rule, to those they train; equally long; or until the loss stands still.
            patience: Rounds without a better loss that end a step of `early_stop`.
            depth: Full-width layers that learn at a time.
            assign: Whether configurations must fit bytes; or, to reproduce the paper, the fleet's
                ratios by the paper's accounting (`accounting.hooks`).
        """

        rounds: Literal["params_added", "params_trainable", "equal", "early_stop"] = "params_added"
        patience: int = 15
        depth: int = 1
        assign: Literal["bytes", "ratio"] = "bytes"

        def __post_init__(self) -> None:
            for name in ("patience", "depth"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"method.{name} must be at least 1")

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self.ignores_budgets = self.options.assign == "ratio"
        norms.refuse_apart(task.recipe.norm, "slt")
        self._costs: dict[tuple[int, int, float], int] = {}

    # ---- configurations

    @cached_property
    def channels(self) -> Channels:
        """The layers: groups of channels, of which a residual stream has one for each block."""
        pair = torch.empty((2, *self.task.image), device="meta")
        found = trace(self.task.build(), pair, loose=True)
        if not found.groups:
            raise ModelError(
                f"{self.task.model.name!r} has no layer that could be narrower; "
                f"slt needs a deeper model, or use fedavg"
            )
        return found

    @cached_property
    def table(self) -> list[float]:
        """The head's width in each step: s_1, s_1, s_2, ..., 1 for steps 0, 1, 2, ..., N."""
        for capacity in self._capacities():
            widths = self._widths(capacity)
            if widths:
                return widths
        raise BudgetTooSmall(*self._shortage())

    def _capacities(self) -> Sequence[int | None]:
        """Return the bytes that configurations may have to fit, the weakest device's first."""
        if self.options.assign == "bytes":
            return self.task.budgets
        return [self._counted(ratio) for ratio in self.task.ratios or (1.0,)]

    def _counted(self, ratio: float) -> int:
        """Return the paper's bytes of the model at a width."""
        return accounting.hooks(self.task.build(min(ratio, 1.0)), self._images)

    def _widths(self, capacity: int | None) -> list[float]:
        """Return the widest heads that fit, for all steps; an empty list if some step has none."""
        found = [1.0]
        for step in range(len(self.channels.groups), 0, -1):
            width = self._widest(step, capacity, found[0])
            if not width:
                return []
            found.insert(0, width)
        first = self._widest(0, capacity, found[0])
        # Only the first step at full width has anything new to train; the others are left out.
        steps = [width for width in found[:-1] if width < 1]
        return [first, *steps, *([1.0] if first < 1 else [])] if first else []

    def _widest(self, step: int, capacity: int | None, most: float) -> float:
        """Return the widest head of a step that fits, up to a width; 0 if there is none."""
        frozen = max(step - self.options.depth, 0)
        # Only whole channels of the widest layer are told apart; wider heads cost more.
        choices = [(channel + 1) / self._largest for channel in range(round(most * self._largest))]
        if capacity is None or self.cost(step, frozen, choices[-1]) <= capacity:
            return choices[-1]
        fitting = bisect_right(choices, capacity, key=partial(self.cost, step, frozen))
        # The paper's tables exceed its own accounting where not even one channel fits.
        least = choices[0] if self.options.assign == "ratio" else 0.0
        return choices[fitting - 1] if fitting else least

    @cached_property
    def _largest(self) -> int:
        return max(group.size for group in self.channels.groups)

    def _shortage(self) -> tuple[int, int, str]:
        budget = max(capacity for capacity in self._capacities() if capacity is not None)
        steps = range(len(self.channels.groups) + 1)
        needed = (self.cost(n, max(n - self.options.depth, 0), 1 / self._largest) for n in steps)
        return budget, max(needed), "training every layer before a head of one channel"

    def cost(self, full: int, frozen: int, width: float) -> int:
        """Return the bytes of a configuration, predicted or as the paper counts them."""
        key = (full, frozen, width)
        if key not in self._costs:
            # Built for this only: a search looks at too many models to keep them.
            module = self.build(self.piece(full, width))
            stage = replace(self.stages(0)[0], trainable=self.names(frozen))
            if self.options.assign == "ratio":
                self._costs[key] = accounting.hooks(module, self._images, stage.trainable)
            else:
                self._costs[key] = self.predicted(module, stage).peak
        return self._costs[key]

    @property
    def _images(self) -> torch.Tensor:
        return torch.empty((self.task.recipe.batch, *self.task.image), device="meta")

    def names(self, frozen: int) -> tuple[str, ...] | None:
        """Return the parameters that learn when so many layers are frozen; None is all."""
        if not frozen:
            return None
        found = ((name, self.channels.layer(name)) for name, _ in self._parameters)
        return tuple(name for name, layer in found if layer is None or layer >= frozen)

    @cached_property
    def _parameters(self) -> list[tuple[str, torch.Size]]:
        return [(name, p.shape) for name, p in self.pattern(self.main).named_parameters()]

    # ---- pieces

    def piece(self, full: int, width: float) -> Piece:
        """Return the model with so many layers at full width and the others at another."""
        if width == 1:
            return self.main
        return Piece(f"{full} full, head {width:.3g}", {"full": full, "width": width})

    def build(self, piece: Piece) -> nn.Module:
        """Build a configuration's model, cut from a fresh full one."""
        full = self.task.build()
        if not piece.cut:
            return full
        return cutting.shrink(full, self.channels, self._kept(piece), check=False)

    def _kept(self, piece: Piece) -> dict[str, torch.Tensor]:
        full, width = piece.cut["full"], piece.cut["width"]
        return indices.keep(
            self.channels, lambda g: 1.0 if g.index < full else width, rounding="floor_min1"
        )

    def view(self, piece: Piece) -> View:
        """Return which channels of the server's tensors a configuration consists of."""
        if not piece.cut:
            return super().view(piece)
        if piece.size not in self._views:
            slots = cutting.view(self.channels, self._kept(piece))
            names = training.own_tensors(self.module(self.main))
            self._views[piece.size] = {name: slots[name] for name in names}
        return self._views[piece.size]

    # ---- the server

    def setup(self) -> State:
        """Return the full model and the configurations: workers need not look for them again."""
        state = super().setup()
        pieces = [self.piece(n, width) for n, width in enumerate(self.table)]
        extras = {"widths": self.table, "ends": self.ends(), "step": 0, "trained": 0}
        extras |= {"best": None, "since": 0}
        return replace(self.extended(state, pieces), extras={**state.extras, **extras})

    def ends(self) -> list[int]:
        """Return the round after which each step ends; the last runs to the end."""
        steps, total = len(self.table), self.task.rounds
        sizes = [self._size(n, width) for n, width in enumerate(self.table)]
        if self.options.rounds == "equal":
            ends = [total * (n + 1) / steps for n in range(steps)]
        elif self.options.rounds == "params_trainable":
            start = int(self.table[0] * total)
            learning = [
                self._size(n, width, max(n - self.options.depth, 0))
                for n, width in enumerate(self.table)
            ][1:]
            shares = accumulate(learning)
            ends = [start, *(start + (total - start) * s / sum(learning) for s in shares)]
        else:
            ends = [total * size / sizes[-1] for size in sizes]
        return [*(int(end) for end in ends[:-1]), total]

    def _size(self, step: int, width: float, frozen: int = 0) -> int:
        """Return the number of parameters of a configuration, or of those that learn."""
        view, names = self.view(self.piece(step, width)), self.names(frozen)
        whole = {name: torch.empty(shape, device="meta") for name, shape in self._parameters}
        return sum(prod(view[name].shape(whole)) for name in names or whole)

    def step(self, state: State, round_index: int) -> int:
        """Return the step of a round."""
        if self.options.rounds == "early_stop":
            return int(state.extras["step"])
        return next(n for n, end in enumerate(state.extras["ends"]) if round_index < end)

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device the round's configuration, with as few frozen layers as it can hold."""
        step = self.step(state, round_index)
        width = state.extras["widths"][step]
        frozen = max(step - self.options.depth, 0)
        capacity: int | None = device.memory
        if self.options.assign == "ratio":
            capacity = self._counted(ratio_of(device))
        low, high = 0, frozen
        while low < high:
            middle = (low + high) // 2
            fits = capacity is None or self.cost(step, middle, width) <= capacity
            low, high = (low, middle) if fits else (middle + 1, high)
        (whole,) = self.stages(round_index)
        stage = replace(whole, trainable=self.names(low), name=f"{low} frozen")
        piece = self.piece(step, width)
        return self.affordable(Plan(device.id, round_index, device.group, piece, (stage,)), device)

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state, and note which configuration it is for."""
        losses: list[tuple[float, int]] = []
        rounds: set[int] = set()

        def noted() -> Iterator[Update]:
            for update in updates:
                losses.append((update.loss, update.samples))
                rounds.add(update.plan.round)
                yield update

        merged = super().merge(state, noted())
        if not losses:
            return merged
        if self.options.rounds != "early_stop":
            step = self.step(state, rounds.pop())
            return replace(merged, extras={**merged.extras, "trained": step})
        loss = sum(value * n for value, n in losses) / sum(n for _, n in losses)
        judged = {**self._judged(state, loss), "trained": state.extras["step"]}
        return replace(merged, extras={**merged.extras, **judged})

    def _judged(self, state: State, loss: float) -> dict[str, Any]:
        """Return whether a step goes on, given the loss of its latest round."""
        step, best, since = (state.extras[key] for key in ("step", "best", "since"))
        if best is None or loss < best:
            return {"step": step, "best": loss, "since": 0}
        if since + 1 < self.options.patience or step + 1 == len(state.extras["widths"]):
            return {"step": step, "best": best, "since": since + 1}
        return {"step": step + 1, "best": None, "since": 0}

    def pieces(self, state: State) -> Sequence[Piece]:
        """Return the full model and the current configuration."""
        step = state.extras["trained"]
        current = self.piece(step, state.extras["widths"][step])
        return (self.main,) if current == self.main else (self.main, current)
