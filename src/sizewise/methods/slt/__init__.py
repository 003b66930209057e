"""SLT: layers are trained one after the other at full width; what follows is a narrow head.

Pfeiffer, Khalili, Henkel: "Aggregating Capacity in FL through Successive Layer Training for
Computationally-Constrained Devices", NeurIPS 2023 (https://arxiv.org/abs/2305.17005).

    step n:    layers 1..n-1 are frozen; layer n learns at full width; layers n+1..K at width s_n
    device:    E epochs of SGD on all that is not frozen; frozen layers keep no activations
    server:    each entry of w <- mean over the devices that trained it; others stay
    widths:    s_0 = s_1 <= s_2 <= ... <= s_N = 1, the largest that fit the smallest budget

Step 0, pre-training, trains the whole net at width s_1. What a layer is and how a model is narrowed
is in `configurations`. `rounds` says how rounds are divided among the steps. A device with more
bytes freezes fewer layers; it never changes s_n. `depth` trains that many full layers at a time
(Appendix B: a narrower head in exchange).

Frozen layers are neither sent nor counted; the public code averages in the copies of devices that
froze them (`frozen_in_mean`). `early_stop` looks at the devices' training loss, as a server has no
test set.

Deployed are the full model and, last, the current configuration, which people run until the end.

Discloses: the trained weights of each device, to the server.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from sizewise.errors import BudgetTooSmall, ConfigError, ModelError
from sizewise.exchange.plan import Plan, Submodel, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut
from sizewise.families.base import Method
from sizewise.families.options import AssignedOptions, acts_only
from sizewise.fleet.devices import Device
from sizewise.memory import accounting
from sizewise.memory.packing import largest_fitting
from sizewise.methods.slt.configurations import (
    Configuration,
    Freezing,
    LayerSubmodels,
    configuration,
)
from sizewise.surgery import norms
from sizewise.training.task import Task


@dataclass(frozen=True)
class Progress:
    """What the server notes: workers need not look for configurations again.

    Attributes:
        widths: The head's width in each step.
        ends: The round after which each step ends.
        trained: The step that was trained last.
        step: With `early_stop`, the step of the next round.
        best: And the best loss of that step; None before its first round.
        since: And for how many rounds it has not become better.
    """

    widths: tuple[float, ...]
    ends: tuple[int, ...]
    trained: int = 0
    step: int = 0
    best: float | None = None
    since: int = 0

    def configuration(self, step: int) -> Configuration:
        """Return what a step trains."""
        return configuration(step, self.widths[step])


class SLT(Method):
    """Successive layer training."""

    submodel_type: type[Configuration] = Configuration
    work_type: type[Freezing] = Freezing

    @dataclass(frozen=True)
    class Options(AssignedOptions):
        """Options of SLT. By ratio, bytes are counted as the paper counts (`accounting.hooks`).

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

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        norms.refuse_apart(task.recipe.norm, "slt")
        # What configurations and widths need: a cache, never a result.
        self._bytes: dict[tuple[int, int, float], int] = {}
        self._counted: dict[float, int] = {}

    @cached_property
    def submodels(self) -> LayerSubmodels:
        """Configurations."""
        return LayerSubmodels(self.task)

    # ---- bytes, predicted or as the paper counts them

    def bytes_of(self, full: int, frozen: int, width: float) -> int:
        """Return the bytes of a step of training a configuration."""
        key = (full, frozen, width)
        if key not in self._bytes:
            # Cut for this only: a search looks at too many models to keep them.
            chosen = configuration(full, width)
            module = self.submodels.cut(chosen)
            stage = replace(self.task.stage(), trainable=self.submodels.learning(frozen))
            if self.options.assign == "ratio":
                images = self.task.inputs(self.task.recipe.batch)
                self._bytes[key] = accounting.hooks(module, images, stage.trainable)
            else:
                try:
                    self._bytes[key] = self.levers.least_with(
                        lambda one: self.costs.of(module, chosen, one).footprint.peak, stage
                    )
                except ModelError:
                    # Which layer is to blame is known to the check.
                    self.submodels.cut(chosen, check=True)
                    raise
        return self._bytes[key]

    def capacity(self, given: float | None) -> float | None:
        """Return bytes, given those of a device or its ratio; None is unlimited."""
        if self.options.assign == "bytes" or given is None:
            return given
        if given not in self._counted:
            images = self.task.inputs(self.task.recipe.batch)
            self._counted[given] = accounting.hooks(self.task.build(min(given, 1)), images)
        return self._counted[given]

    def capacities(self) -> list[float | None]:
        """Return the bytes that configurations may have to fit, the weakest device's first."""
        return [self.capacity(one) for one in self.options.capacities(self.task) or (1.0,)]

    # ---- the head's width in each step

    @cached_property
    def table(self) -> list[float]:
        """The head's width in each step: s_1, s_1, s_2, ..., 1 for steps 0, 1, 2, ..., N."""
        for capacity in self.capacities():
            if widths := self._widths(capacity):
                return widths
        budget = max(capacity for capacity in self.capacities() if capacity is not None)
        steps, narrowest = range(self.submodels.layers + 1), 1 / self.submodels.largest
        needed = max(self.bytes_of(step, self._frozen(step), narrowest) for step in steps)
        what = "training every layer before a head of one channel"
        raise BudgetTooSmall(int(budget), needed, what)

    def _widths(self, capacity: float | None) -> list[float]:
        """Return the widest heads that fit, for all steps; an empty list if some step has none."""
        found = [1.0]
        for step in range(self.submodels.layers, 0, -1):
            width = self._widest(step, capacity, found[0])
            if not width:
                return []
            found.insert(0, width)
        first = self._widest(0, capacity, found[0])
        # Only the first step at full width has anything new to train; the others are left out.
        steps = [width for width in found[:-1] if width < 1]
        return [first, *steps, *([1.0] if first < 1 else [])] if first else []

    def _widest(self, step: int, capacity: float | None, most: float) -> float:
        """Return the widest head of a step that fits, up to a width; 0 if there is none."""
        frozen, largest = self._frozen(step), self.submodels.largest
        # Only whole channels of the widest layer are told apart; wider heads cost more.
        choices = [(channel + 1) / largest for channel in range(round(most * largest))]
        found = largest_fitting(
            choices, lambda w: self.bytes_of(step, frozen, w), capacity, evenly=True
        )
        if found is not None:
            return found
        if self.options.assign == "bytes":
            return 0.0
        # By ratio nobody is refused: where not even one channel fits, the budget is exceeded. The
        # last step has no head that could be narrow.
        return most if step == self.submodels.layers else choices[0]

    def _frozen(self, step: int) -> int:
        """Return how many layers a step freezes on the weakest devices."""
        return max(step - self.options.depth, 0)

    # ---- the rounds of each step

    def ends(self) -> list[int]:
        """Return the round after which each step ends; the last runs to the end."""
        steps, total = len(self.table), self.task.rounds
        if self.options.rounds == "equal":
            ends = [total * (n + 1) / steps for n in range(steps)]
        elif self.options.rounds == "params_trainable":
            start = int(self.table[0] * total)
            learning = [self._parameters(n, self._frozen(n)) for n in range(steps)][1:]
            shares = accumulate(learning)
            ends = [start, *(start + (total - start) * s / sum(learning) for s in shares)]
        else:
            sizes = [self._parameters(n) for n in range(steps)]
            ends = [total * size / sizes[-1] for size in sizes]
        found = [int(end) for end in ends[:-1]]
        if total >= steps:
            # No layer is frozen before a round has trained it: every step has one but the first.
            grown = accumulate(found, lambda before, end: max(before + 1, end))
            found = [min(end, total - steps + 1 + n) for n, end in enumerate(grown)]
        return [*found, total]

    def _parameters(self, step: int, frozen: int = 0) -> int:
        """Return how many parameters of a step's configuration learn."""
        chosen = configuration(step, self.table[step])
        return self.submodels.parameter_count(chosen, frozen)

    def step(self, state: State, round_index: int) -> int:
        """Return the step of a round; the last goes on in a run that is made longer."""
        progress = state.facts(Progress)
        if self.options.rounds == "early_stop":
            return progress.step
        ends = progress.ends
        return next((n for n, end in enumerate(ends) if round_index < end), len(ends) - 1)

    # ---- the server

    def trained(self) -> Sequence[Configuration]:
        """Return what each step trains."""
        return [configuration(step, width) for step, width in enumerate(self.table)]

    def setup(self) -> State:
        """Return the full model, and the configurations."""
        return super().setup().noting(Progress(tuple(self.table), tuple(self.ends())))

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device the round's configuration, with as few frozen layers as it can hold."""
        step, progress = self.step(state, round_index), state.facts(Progress)
        width, most = progress.widths[step], self._frozen(step)
        fewer_frozen = largest_fitting(
            range(most, -1, -1),
            lambda frozen: self.bytes_of(step, frozen, width),
            self.capacity(self.options.capacity(device)),
        )
        frozen = most if fewer_frozen is None else fewer_frozen
        learning, work = self.submodels.learning(frozen), Freezing(frozen)
        stage = replace(self.task.stage(round_index), trainable=learning, work=work)
        return self.offer(device, round_index, progress.configuration(step), stage)

    def unhidden(self) -> str | None:
        """Return that steps may end by the losses of devices."""
        told = "method.rounds = 'early_stop' goes by the losses of devices; choose another"
        return told if self.options.rounds == "early_stop" else super().unhidden()

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state, and note which configuration it is for."""
        losses: list[tuple[float, int]] = []
        rounds: set[int] = set()

        def noted() -> Iterator[Update]:
            for update in updates:
                losses.append((update.loss, update.samples))
                rounds.add(update.plan.round)
                if self.options.frozen_in_mean:
                    # What its device froze counts as it had received it.
                    received = cut(state.tensors, self.submodels.view(update.plan.submodel))
                    update = replace(update, tensors={**received, **update.tensors})
                yield update

        merged = super().merge(state, noted())
        if not losses:
            return merged
        progress = state.facts(Progress)
        if self.options.rounds != "early_stop":
            return merged.noting(replace(progress, trained=self.step(state, rounds.pop())))
        loss = sum(value * n for value, n in losses) / sum(n for _, n in losses)
        return merged.noting(replace(self._judged(progress, loss), trained=progress.step))

    def _judged(self, progress: Progress, loss: float) -> Progress:
        """Return whether a step goes on, given the loss of its latest round."""
        if progress.best is None or loss < progress.best:
            return replace(progress, best=loss, since=0)
        last = progress.step + 1 == len(progress.widths)
        if progress.since + 1 < self.options.patience or last:
            return replace(progress, since=progress.since + 1)
        return replace(progress, step=progress.step + 1, best=None, since=0)

    def sizes(self, state: State) -> Sequence[Submodel]:
        """Return the full model and the current configuration."""
        progress = state.facts(Progress)
        current = progress.configuration(progress.trained)
        return (self.main,) if current == self.main else (self.main, current)
