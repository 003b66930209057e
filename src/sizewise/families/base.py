"""A method: one algorithm, as a few small functions.

The defaults here are FedAvg. A method overrides what it does differently, most often `plan`. The
same object, made from the same config, exists on the server and in every worker, so it must not
remember anything about a run: that is what `State` is for. Four helpers do the rest: `submodels`
builds and keeps models, `costs` predicts bytes, `levers` makes a step fit, `trainer` trains.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

from torch import nn

from sizewise.errors import BudgetTooSmall
from sizewise.exchange import merge_rules, server_optimizers
from sizewise.exchange.merging import Merging
from sizewise.exchange.plan import Plan, Submodel, TrainingStage, Update, Work
from sizewise.exchange.rows import with_rows
from sizewise.exchange.state import State
from sizewise.exchange.traffic import Traffic
from sizewise.exchange.view import Tensors
from sizewise.families.costs import Costs
from sizewise.families.lever_choice import LeverChoice
from sizewise.families.submodels import Submodels, Width
from sizewise.families.trainer import Trainer
from sizewise.fleet.devices import Device
from sizewise.memory.prediction import Cost
from sizewise.steps.step import Loss, cross_entropy
from sizewise.surgery import norms
from sizewise.training.loop import Shard
from sizewise.training.task import Task


@dataclass(frozen=True)
class Deployed:
    """A model that people run.

    Attributes:
        fill: Gives the model; it is valid until the next one is filled.
        owner: The device whose memory it is made from; None: the server has all of it.
    """

    fill: Callable[[], nn.Module]
    owner: int | None = None


class Method:
    """Base class of all methods.

    Attributes:
        discloses: What leaves a device: weights, features, logits, labels. Printed at start-up.
        caution: What people should know about what is disclosed; printed at start-up.
        recipe_defaults: Recipe values this method starts from; the user's config wins.
        constant_step_cost: Whether all steps of a stage need the same bytes, so that metering a few
            will do.
        divides_batches: Whether the loss of a batch is a mean over its samples, so that a device
            that lacks bytes can compute it part by part.
        holds_base: Whether machines hold frozen weights that never travel; those of a node are then
            compared with the server's when it joins.
        own_models: Whether groups of devices may have models of their own (`fleet.group.model`).
        Options: Frozen dataclass of the method's own options, the rest of the `[method]` table.
        submodel_type: The frozen dataclass that says what a device holds.
        work_type: The frozen dataclass that says what a stage does.
        merger: What gives the merge of a round in place of the mean; the run sets it.
    """

    discloses: frozenset[str] = frozenset({"weights"})
    caution: str = ""
    recipe_defaults: ClassVar[Mapping[str, Any]] = {}
    constant_step_cost: bool = True
    holds_base: bool = False
    own_models: bool = False
    divides_batches: bool = True
    submodel_type: type[Submodel] = Width
    work_type: type[Work] = Work
    merger: Callable[[State], Merging] | None = None

    @dataclass(frozen=True)
    class Options:
        """No options."""

        @property
        def ignores_budgets(self) -> bool:
            """Whether devices train more than their bytes hold. Printed at start-up."""
            return False

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        self.task = task
        self.options = self.Options() if options is None else options

    # ---- helpers

    @cached_property
    def submodels(self) -> Submodels:
        """How submodels are built, where their tensors live, and copies of them."""
        return Submodels(self.task)

    @cached_property
    def costs(self) -> Costs:
        """Predicted costs."""
        return Costs(self.task, self.submodels, partial(self.loss, shard=None), self.example)

    @cached_property
    def trainer(self) -> Trainer:
        """Trains devices."""
        return Trainer(self.task, self.submodels, self.constant_step_cost)

    @cached_property
    def levers(self) -> LeverChoice:
        """What makes a step smaller where a device lacks bytes."""
        return LeverChoice(self.task, self.peak, divides=self.divides_batches)

    def peak(self, submodel: Submodel, stage: TrainingStage | None = None) -> int:
        """Return the predicted bytes of one step; default: of training all of a submodel."""
        return self.cost(submodel, stage or self.task.stage()).footprint.peak

    def offer(
        self, device: Device, round_index: int, submodel: Submodel, *stages: TrainingStage
    ) -> Plan:
        """Return a plan with its predicted peak; raise BudgetTooSmall if the device lacks it.

        Args:
            device: Who is asked.
            round_index: The round.
            submodel: What it would hold.
            stages: What it would train; default: all at once.
        """
        budget = None if self.options.ignores_budgets else device.memory
        planned = stages or (self.task.stage(round_index),)
        chosen = tuple(self.levers.cheapest(submodel, stage, budget) for stage in planned)
        peak = max(self.peak(submodel, stage) for stage in chosen)
        if budget is not None and peak > budget:
            needed = max(self.levers.least(submodel, stage) for stage in planned)
            raise BudgetTooSmall(budget, needed, f"one training step of the {submodel.label} model")
        return Plan(device.id, round_index, device.group, submodel, chosen, budget, peak)

    # ---- the server, before the first round

    @cached_property
    def main(self) -> Submodel:
        """The submodel that the server's model consists of."""
        return self.submodel_type()

    def trained(self) -> Sequence[Submodel]:
        """Return the submodels that devices of the fleet train, smallest first."""
        return (self.main,)

    def setup(self) -> State:
        """Return the state that the first round starts from."""
        state = State(self.submodels.initial(self.main))
        return self.submodels.extended(state, self.trained())

    # ---- the server, for each device of a round

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Return what a device does in a round; raise BudgetTooSmall if it can do nothing."""
        return self.offer(device, round_index, self.main)

    def plan_upper_bound(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the largest plan that a device may get in a round, where plans are drawn."""
        return self.plan(state, device, round_index)

    def cost(self, submodel: Submodel, stage: TrainingStage) -> Cost:
        """Return what one training step of a stage is predicted to take."""
        return self.costs.step(submodel, stage)

    def flops_per_sample(self, submodel: Submodel, stage: TrainingStage) -> int:
        """Return the FLOPs of training on one sample in a stage."""
        return self.cost(submodel, stage).flops // self.task.recipe.batch

    def payload(self, state: State, plan: Plan) -> Tensors:
        """Return what the server sends a device beside its view; `train` finds it there too."""
        return {}

    def traffic(self, plan: Plan, samples: int) -> Traffic:
        """Return the shapes of what travels beside the view, for a device with so many samples."""
        return Traffic()

    # ---- the device

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, device_state: Tensors) -> Update:
        """Train what the plan says and return it. A pure function of its arguments.

        Args:
            plan: What to do.
            tensors: The device's view of the server's tensors, by local name, and its payload.
            shard: Its data.
            device_state: What it remembers from its last round; empty at first.
        """
        loss = partial(self.loss, plan.submodel, shard=shard)
        return self.trainer.fit(plan, tensors, shard, loss)

    def loss(self, submodel: Any, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return what a device minimises in a stage; without its data, the costliest of them."""
        return cross_entropy

    def example(self, submodel: Any, stage: TrainingStage, batch: int) -> tuple[Any, Any]:
        """Return so many inputs of a stage and their targets, of which only the shapes matter."""
        return self.task.inputs(batch), self.task.targets(batch)

    # ---- the server, after a round

    def merging(self, state: State) -> Merging:
        """Return what adds up the updates of a round."""
        if self.merger is not None:
            return self.merger(state)
        return merge_rules.make(self.task.recipe, state.tensors)

    def unclipped(self) -> str | None:
        """Return how a device could change more than its clipped update does; None if it cannot.

        Of a merge that uses `merging` for all that devices send, and nothing of who came.
        """
        if type(self).merge is Method.merge and type(self).merging is Method.merging:
            return None
        return "its merge may use more of a device than its clipped update; use another method"

    def unhidden(self) -> str | None:
        """Return what leaves a device of its samples beside trained weights; None: nothing."""
        if more := sorted(self.discloses - {"weights"}):
            return f"devices send {' and '.join(more)} of their samples; use another method"
        if not self.divides_batches:
            return "the loss of a sample depends on its batch; use another method or option"
        if norms.has_batch_norm(self.task.build()):
            return "batch norms mix samples; use a model with layer or group norms, or none"
        return None

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state. Updates arrive one by one and should not be collected."""
        mean = self.merging(state)
        for update in updates:
            view = self.submodels.view(update.plan.submodel)
            rows = with_rows(view, update.rows, state.tensors)
            mean.add(update.tensors, rows, self.task.weight(update))
        parameters = self.submodels.parameters(state, self.main)
        merged, moments = server_optimizers.apply(
            self.task.recipe,
            state.tensors,
            mean.result(),
            state.server_state,
            {name: mean.covered(name) for name in parameters},
        )
        return replace(state, tensors=merged, server_state=moments)

    # ---- what people run

    def sizes(self, state: State) -> Sequence[Submodel]:
        """Return the submodels that people run, smallest first."""
        return (self.main,)

    def size_of(self, plan: Plan) -> Submodel:
        """Return which of the sizes a device runs that trains this plan: what it trains."""
        return plan.submodel

    def deploy(self, state: State) -> Mapping[str, Deployed]:
        """Return the models that people run, by what they are called."""
        filled = self.submodels.filled
        return {s.label: Deployed(partial(filled, s, state)) for s in self.sizes(state)}

    def summary_metric(self, sizes: Mapping[str, float]) -> float:
        """Return the one figure to show for a run, given each model's: that of the last one."""
        return list(sizes.values())[-1]
