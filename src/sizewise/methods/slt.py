"""SLT: layers are trained one after the other at full width; what follows is a narrow head.

Pfeiffer, Khalili, Henkel: "Aggregating Capacity in FL through Successive Layer Training for
Computationally-Constrained Devices", NeurIPS 2023 (https://arxiv.org/abs/2305.17005).

    step n:    layers 1..n-1 are frozen; layer n learns at full width; layers n+1..K at width s_n
    device:    E epochs of SGD on all that is not frozen; frozen layers keep no activations
    server:    each entry of w <- mean over the devices that trained it; others stay
    widths:    s_0 = s_1 <= s_2 <= ... <= s_N = 1, the largest that fit the smallest budget

Step 0, pre-training, trains the whole net at width s_1. What a layer is and how a model is narrowed
is in `stepwise`. `rounds` says how rounds are divided among the steps. A device with more bytes
freezes fewer layers; it never changes s_n. `depth` trains that many full layers at a time (Appendix
B: a narrower head in exchange).

Frozen layers are neither sent nor counted; the public code averages in the copies of devices that
froze them (`frozen_in_mean`). `early_stop` looks at the devices' training loss, as a server has no
test set.

Deployed are the full model and, last, the current configuration, which people run until the end.

Discloses: the trained weights of each device, to the server.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Piece, Plan, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut
from sizewise.families.options import acts_only
from sizewise.families.stepwise import Stepwise
from sizewise.fleet.devices import Device
from sizewise.memory.packing import count_fitting


class SLT(Stepwise):
    """Successive layer training."""

    @dataclass(frozen=True)
    class Options(Stepwise.Options):
        """Options of SLT.

        Attributes:
            rounds: How long steps last: in proportion to the parameters that they add; the public
                code's rule, to those they train; equally long; or until the loss stands still.
            patience: Rounds without a better loss that end a step of `early_stop`.
            depth: Full-width layers that learn at a time.
            frozen_in_mean: Count devices that froze a layer which others trained as if they had
                sent back what they received, as the public code does.
        """

        rounds: Literal["params_added", "params_trainable", "equal", "early_stop"] = "params_added"
        patience: int = 15
        depth: int = 1
        frozen_in_mean: bool = False

        def __post_init__(self) -> None:
            for name in ("patience", "depth"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"method.{name} must be at least 1")
            early = self.rounds == "early_stop"
            acts_only(self, "patience", "method.rounds = 'early_stop'", early)

    # ---- the head's width in each step

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
        return [self.counted(ratio) for ratio in self.task.ratios or (1.0,)]

    def _widths(self, capacity: int | None) -> list[float]:
        """Return the widest heads that fit, for all steps; an empty list if some step has none."""
        found = [1.0]
        for step in range(self.layers, 0, -1):
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
        frozen = self._frozen(step)
        # Only whole channels of the widest layer are told apart; wider heads cost more.
        choices = [(channel + 1) / self.largest for channel in range(round(most * self.largest))]
        if capacity is None:
            return choices[-1]
        fitting = count_fitting(partial(self.bytes_of, step, frozen), capacity, choices)
        if fitting:
            return choices[fitting - 1]
        if self.options.assign == "bytes":
            return 0.0
        # By ratio nobody is refused: where not even one channel fits, the budget is exceeded. The
        # last step has no head that could be narrow.
        return most if step == self.layers else choices[0]

    def _frozen(self, step: int) -> int:
        """Return how many layers a step freezes on the weakest devices."""
        return max(step - int(self.options.depth), 0)

    def _shortage(self) -> tuple[int, int, str]:
        budget = max(capacity for capacity in self._capacities() if capacity is not None)
        steps = range(self.layers + 1)
        needed = max(self.bytes_of(step, self._frozen(step), 1 / self.largest) for step in steps)
        return budget, needed, "training every layer before a head of one channel"

    # ---- the rounds of each step

    def ends(self) -> list[int]:
        """Return the round after which each step ends; the last runs to the end."""
        steps, total = len(self.table), self.task.rounds
        if self.options.rounds == "equal":
            ends = [total * (n + 1) / steps for n in range(steps)]
        elif self.options.rounds == "params_trainable":
            start = int(self.table[0] * total)
            learning = [
                self.parameter_count(n, width, self._frozen(n))
                for n, width in enumerate(self.table)
            ][1:]
            shares = accumulate(learning)
            ends = [start, *(start + (total - start) * s / sum(learning) for s in shares)]
        else:
            sizes = [self.parameter_count(n, width) for n, width in enumerate(self.table)]
            ends = [total * size / sizes[-1] for size in sizes]
        found = [int(end) for end in ends[:-1]]
        if total >= steps:
            # No layer is frozen before a round has trained it: every step has one but the first.
            grown = accumulate(found, lambda before, end: max(before + 1, end))
            found = [min(end, total - steps + 1 + n) for n, end in enumerate(grown)]
        return [*found, total]

    def step(self, state: State, round_index: int) -> int:
        """Return the step of a round; the last goes on in a run that is made longer."""
        if self.options.rounds == "early_stop":
            return int(state.extras["step"])
        ends = state.extras["ends"]
        return next((n for n, end in enumerate(ends) if round_index < end), len(ends) - 1)

    # ---- the server

    def setup(self) -> State:
        """Return the full model and the configurations: workers need not look for them again."""
        state = super().setup()
        pieces = [self.piece(n, width) for n, width in enumerate(self.table)]
        extras = {"widths": self.table, "ends": self.ends(), "step": 0, "trained": 0}
        extras |= {"best": None, "since": 0}
        return replace(self.extended(state, pieces), extras={**state.extras, **extras})

    def cuts(self) -> Sequence[Piece]:
        """Return the first configuration, and the one whose width drops half way."""
        pieces = [self.piece(n, width) for n, width in enumerate(self.table) if width < 1]
        return [*pieces[:1], *pieces[len(pieces) // 2 :][:1]]

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device the round's configuration, with as few frozen layers as it can hold."""
        step = self.step(state, round_index)
        width, capacity = state.extras["widths"][step], self.capacity(device)
        low, high = 0, self._frozen(step)
        while low < high:
            middle = (low + high) // 2
            fits = capacity is None or self.bytes_of(step, middle, width) <= capacity
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
                yield self._completed(update, state) if self.options.frozen_in_mean else update

        merged = super().merge(state, noted())
        if not losses:
            return merged
        if self.options.rounds != "early_stop":
            step = self.step(state, rounds.pop())
            return replace(merged, extras={**merged.extras, "trained": step})
        loss = sum(value * n for value, n in losses) / sum(n for _, n in losses)
        judged = {**self._judged(state, loss), "trained": state.extras["step"]}
        return replace(merged, extras={**merged.extras, **judged})

    def _completed(self, update: Update, state: State) -> Update:
        """Return an update that also has what its device froze, as it had received it."""
        received = cut(state.tensors, self.view(update.plan.piece))
        return replace(update, tensors={**received, **update.tensors})

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
