"""DepthFL: devices hold as many blocks as fit; exits at several depths learn from each other.

Kim, Yu, Kim, Moon: "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023
(https://openreview.net/forum?id=pf8RIZTMU58).

    depth d:   the stem, all blocks up to exit d, and exits 1..d; z_i are the logits of exit i
    device k:  minimises  sum_i CE(z_i, y) + w(t)/(d-1) sum_i sum_{j != i} KL(p_j || p_i),
               with p_j = softmax(z_j) fixed and w(t) = exp(-5 (1 - min(t, 300)/300)^2) in round t
    server:    each tensor of w <- mean over the devices that hold it, each counting the same
    run:       the mean of the logits of exits 1..d, for any depth d

Blocks above a device's depth do not exist on it: they are neither sent nor built. On top of this
the paper runs FedDyn (see `feddyn`); `feddyn = false` and `distil = false` give its "DepthFL
(FedAvg)", and `extended = false`, where a device has its deepest exit only, its "InclusiveFL".

Exits are at the ends of stages, as in the paper's ResNet-18, and their bottlenecks follow the
stages of the model at hand (see `exits`). Models without feature maps have copies of their own head
as exits. Depths fit bytes; `assign = "ratio"` gives the paper's, where quarter q of the fleet has
depth q. Weights and biases that nobody trained in a round keep their value and their part of h.

Deployed are each exit alone, then each depth as smaller devices run it; the last is the deepest
that anybody trains.

Discloses: the trained weights of each device, to the server.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import exp
from typing import Any, ClassVar

from torch import Tensor

from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, TrainingStage, Update, observed
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors
from sizewise.families import feddyn
from sizewise.families.exits import MultiExit
from sizewise.families.options import acts_only
from sizewise.families.prefixwise import Depth, Depths, Prefixwise
from sizewise.steps.mutual import mutual_learning
from sizewise.steps.step import Loss
from sizewise.surgery import norms
from sizewise.training.loop import Shard
from sizewise.training.task import Task


class DepthFL(Prefixwise):
    """Models of several depths, with an exit at each."""

    recipe_defaults: ClassVar[Mapping[str, Any]] = {"norm": "tracked", "weighting": "equal"}

    @dataclass(frozen=True)
    class Options(Prefixwise.Options):
        """Options of DepthFL.

        Attributes:
            distil: Whether exits learn from each other.
            ramp: The round from which they do so in full.
            feddyn: Whether FedDyn corrects what devices and the server do.
            alpha: Its strength.
            extended: Whether a device has all exits up to its depth, or the deepest only.
        """

        distil: bool = True
        ramp: int = 300
        feddyn: bool = True
        alpha: float = 0.1
        extended: bool = True

        def __post_init__(self) -> None:
            if self.ramp < 1:
                raise ConfigError(f"method.ramp must be at least 1 round, not {self.ramp}")
            if not self.alpha > 0:
                raise ConfigError(f"method.alpha must be positive, not {self.alpha}")
            acts_only(self, "ramp", "method.distil = true", self.distil)
            acts_only(self, "alpha", "method.feddyn = true", self.feddyn)

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        chosen = self.Options() if options is None else options
        norms.refuse_apart(task.recipe.norm, "depthfl")
        if chosen.feddyn:
            task = replace(task, recipe=feddyn.proximal(task.recipe, chosen.alpha))
        super().__init__(task, chosen)

    # ---- depths

    def ensemble(self, depth: int) -> Depth:
        """Return the submodel of a depth with all its exits."""
        return Depth(self.stops[:depth], f"depth {depth}")

    def trainee(self, depth: int) -> Depth:
        """Return what a device of a depth trains."""
        return self.ensemble(depth) if self.options.extended else self.single(depth)

    @cached_property
    def main(self) -> Depth:
        """The whole model with all exits."""
        return self.ensemble(len(self.stops))

    # ---- the device

    def loss(self, submodel: Any, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the joint loss of the exits, as they learn from each other in full."""
        return partial(joint, weight=float(self.options.distil))

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, device_state: Tensors) -> Update:
        """Train; with FedDyn, pulled to where the device's state says, which then moves on."""
        options, strength = self.options, self.task.recipe.proximal
        weight = ramp_up(plan.round, options.ramp) if options.distil else 0.0
        anchor = feddyn.anchor(tensors, device_state, strength) if options.feddyn else None
        loss = partial(joint, weight=weight)
        update = self.trainer.fit(plan, tensors, shard, lambda stage: loss, anchor=anchor)
        if not options.feddyn:
            return update
        named = dict(self.submodels.module(plan.submodel).named_parameters())
        trained = {name: update.tensors[name] for name in sorted(named.keys() & update.tensors)}
        moved = feddyn.remembered(device_state, tensors, trained, options.alpha)
        return replace(update, device_state=moved)

    # ---- the server, after a round

    def unclipped(self) -> str | None:
        """Return that FedDyn counts devices; without it, the merge is the mean alone."""
        counts = "FedDyn counts the devices that came; set method.feddyn = false"
        return counts if self.options.feddyn else None

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state; with FedDyn, corrected where somebody trained."""
        counts = Counter[str]()

        def count(update: Update) -> None:
            view = self.submodels.view(update.plan.submodel)
            counts.update(view[name].name for name in update.tensors)

        merged = super().merge(state, observed(updates, count))
        if not self.options.feddyn:
            return merged
        names = self.submodels.parameters(state, self.main)
        shares = {name: counts[name] / self.task.devices for name in names if counts[name]}
        tensors, server_state = feddyn.correct(
            state.tensors, merged.tensors, state.server_state, shares, self.options.alpha
        )
        return replace(merged, tensors=tensors, server_state=server_state)

    # ---- what people run

    def sizes(self, state: State) -> Sequence[Depth]:
        """Return each exit that somebody trains, then each depth with all its exits."""
        depths = state.facts(Depths).depths
        if not self.options.extended:
            return [self.single(depth) for depth in depths]
        every = range(1, depths[-1] + 1)
        return [*map(self.single, every), *map(self.ensemble, every)]


def ramp_up(round_index: int, length: int) -> float:
    """Return how much exits learn from each other in a round, counted from 0: e^-5 at first."""
    return exp(-5 * (1 - min(round_index, length) / length) ** 2)


def joint(module: MultiExit, inputs: Tensor, labels: Tensor, weight: float) -> Tensor:
    """Return the sum over all exits of CE(z_i, y) + weight * mean over j != i of KL(p_j || p_i)."""
    return mutual_learning(module.logits(inputs), labels, weight)
