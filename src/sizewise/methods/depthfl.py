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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import exp
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from sizewise.errors import ConfigError
from sizewise.exchange.plan import Submodel, Plan, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors
from sizewise.families import feddyn
from sizewise.families.exits import MultiExit
from sizewise.families.options import acts_only
from sizewise.families.prefixwise import Prefixwise
from sizewise.steps.step import Loss, compare
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

    def __init__(self, task: Task, options: Any = None) -> None:
        chosen = self.Options() if options is None else options
        norms.refuse_apart(task.recipe.norm, "depthfl")
        if chosen.feddyn:
            task = replace(task, recipe=feddyn.proximal(task.recipe, chosen.alpha))
        super().__init__(task, chosen)

    # ---- depths

    def ensemble(self, depth: int) -> Submodel:
        """Return the piece of a depth with all its exits."""
        return Submodel(f"depth {depth}", {"exits": list(self.stops[:depth])})

    def trainee(self, depth: int) -> Submodel:
        """Return what a device of a depth trains."""
        return self.ensemble(depth) if self.options.extended else self.single(depth)

    @cached_property
    def main(self) -> Submodel:
        """The whole model with all exits."""
        return self.ensemble(len(self.stops))

    def stages(self, round_index: int) -> tuple[TrainingStage, ...]:
        """Return the one stage of a round; it carries how much exits learn from each other."""
        (stage,) = super().stages(round_index)
        if not self.options.distil:
            return (stage,)
        return (replace(stage, cut={"weight": ramp_up(round_index, self.options.ramp)}),)

    # ---- the device

    def objective(self, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the joint loss of the exits."""
        return partial(joint, weight=stage.cut.get("weight", 0.0))

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train; with FedDyn, pulled to where the device's memory says, which then moves on."""
        if not self.options.feddyn:
            return super().train(plan, tensors, shard, memory)
        alpha, strength = self.options.alpha, self.task.recipe.proximal
        update = self.fit(plan, tensors, shard, feddyn.anchor(tensors, memory, strength))
        names = dict(self.module(plan.piece).named_parameters()).keys() & update.tensors.keys()
        trained = {name: update.tensors[name] for name in sorted(names)}
        return replace(update, memory=feddyn.remembered(memory, tensors, trained, alpha))

    # ---- the server, after a round

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state; with FedDyn, corrected where somebody trained."""
        counts = Counter[str]()

        def counted() -> Iterator[Update]:
            for update in updates:
                view = self.view(update.plan.piece)
                counts.update(view[name].name for name in update.tensors)
                yield update

        merged = super().merge(state, counted())
        if not self.options.feddyn:
            return merged
        trained = [name for name in self.parameters(state) if counts[name]]
        shares = {name: counts[name] / self.task.devices for name in trained}
        tensors, memory = feddyn.correct(
            state.tensors, merged.tensors, state.memory, shares, self.options.alpha
        )
        return replace(merged, tensors=tensors, memory=memory)

    # ---- what people run

    def pieces(self, state: State) -> Sequence[Submodel]:
        """Return each exit that somebody trains, then each depth with all its exits."""
        depths = state.extras["depths"]
        if not self.options.extended:
            return [self.single(depth) for depth in depths]
        every = range(1, depths[-1] + 1)
        return [*map(self.single, every), *map(self.ensemble, every)]


def ramp_up(round_index: int, length: int) -> float:
    """Return how much exits learn from each other in a round, counted from 0: e^-5 at first."""
    return exp(-5 * (1 - min(round_index, length) / length) ** 2)


def joint(module: MultiExit, inputs: Tensor, labels: Tensor, weight: float) -> Tensor:
    """Return the sum over all exits of CE(z_i, y) + weight * mean over j != i of KL(p_j || p_i).

    Args:
        module: The model, with d exits.
        inputs: A batch of images.
        labels: Their classes (B,).
        weight: How much exits learn from each other; 0: not at all.
    """
    logits = module.logits(inputs)
    total = compare(logits[0], labels)
    for own in logits[1:]:
        total = total + compare(own, labels)
    if not weight or len(logits) == 1:
        return total
    for own in logits:
        guesses = own.log_softmax(-1)
        for other in logits:
            if other is not own:
                divergence = F.kl_div(guesses, other.detach().softmax(-1), reduction="batchmean")
                total = total + weight / (len(logits) - 1) * divergence
    return total
