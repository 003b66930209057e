"""A method: one algorithm, as a few small functions.

The defaults here are FedAvg. A method overrides what it does differently, most often `plan` and
`view`. The same object, made from the same config, exists on the server and in every worker, so it
must not remember anything about a run: that is what `State` is for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import nn

from sizewise.common import rng
from sizewise.cutting.channels import Channels, Kept
from sizewise.errors import BudgetTooSmall
from sizewise.exchange import server_optimizers
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.plan import Piece, Plan, Stage, Update
from sizewise.exchange.rows import with_rows
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, View, check, check_shared, cut, whole
from sizewise.fleet.devices import Device
from sizewise.memory import prediction
from sizewise.memory.prediction import Cost, Footprint, Meter
from sizewise.steps.optimizers import MOMENTS, make_optimizer
from sizewise.steps.step import Loss, cross_entropy
from sizewise.surgery import norms
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.blockwise import hidden_shapes
from sizewise.torch_tools.remaking import clone, remade
from sizewise.training import loop
from sizewise.training.loop import Samples, Shard
from sizewise.training.task import Task
from sizewise.training.working import WorkingCopy


class Method:
    """Base class of all methods.

    Attributes:
        discloses: What leaves a device: weights, features, logits, labels. Printed at start-up.
        ignores_budgets: Whether devices train more than their bytes hold. Printed at start-up.
        recipe_defaults: Recipe values this method starts from; the user's config wins.
        steady: Whether all steps of a stage need the same bytes, so that metering a few will do.
        own_models: Whether groups of devices may have models of their own (`fleet.group.model`).
        caution: What people should know about what is disclosed; printed at start-up.
        Options: Frozen dataclass of the method's own options, the rest of the `[method]` table.
    """

    discloses: frozenset[str] = frozenset({"weights"})
    ignores_budgets: bool = False
    recipe_defaults: ClassVar[Mapping[str, Any]] = {}
    steady: bool = True
    own_models: bool = False
    caution: str = ""

    @dataclass(frozen=True)
    class Options:
        """No options."""

    def __init__(self, task: Task, options: Any = None) -> None:
        self.task = task
        self.options: Any = self.Options() if options is None else options
        # Working copies and figures that depend on shapes only: caches, never results.
        self._copies: dict[str, WorkingCopy] = {}
        self._patterns: dict[str, nn.Module] = {}
        self._views: dict[str, View] = {}
        self._costs: dict[tuple[object, ...], Cost] = {}
        self._metered: dict[tuple[object, ...], int] = {}

    @cached_property
    def main(self) -> Piece:
        """The piece that the server's model consists of."""
        return Piece()

    # ---- the model

    @cached_property
    def parts(self) -> Anatomy:
        """Stem, blocks and head of the model, for methods that take it apart."""
        return self.task.anatomy(self.task.build())

    @cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of a sample's hidden tensor after the stem and after each block."""
        return hidden_shapes(self.task.build().eval(), self.parts, self.task.drawn(2))

    @cached_property
    def first_names(self) -> dict[str, str]:
        """For each name of a tensor in the full model, the first of those that it is tied under."""
        tensors = self.task.build().state_dict(keep_vars=True)
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}

    # ---- the server, before the first round

    def setup(self) -> State:
        """Return the state that the first round starts from."""
        tensors, view = {}, self.view(self.main)
        module = self.build(self.main)
        given = self.task.pretrained(module)
        for local, tensor in loop.own_tensors(module).items():
            name = view[local].name
            known = given.get(name.partition("@")[0], tensor)
            tensors[name] = known.detach().clone()
        return State(tensors)

    def extended(self, state: State, pieces: Iterable[Piece]) -> State:
        """Return a state that also has the tensors which only these pieces have."""
        tensors = dict(state.tensors)
        for piece in pieces:
            self.pattern(piece)  # First: the working copy behind the view is then copied from it.
            missing = {n: slot for n, slot in self.view(piece).items() if slot.name not in tensors}
            fresh = loop.own_tensors(self.pattern(piece)) if missing else {}
            for local, slot in missing.items():
                tensors[slot.name] = fresh[local].detach().clone()
        return replace(state, tensors=tensors)

    def build(self, piece: Piece) -> nn.Module:
        """Build a fresh model of a piece's shapes."""
        return self.task.build(piece.cut.get("width", 1.0))

    def copy(self, piece: Piece) -> WorkingCopy:
        """Return this process's working copy for pieces of this size."""
        if piece.size not in self._copies:
            pattern = self._patterns.get(piece.size)
            fresh = self.build(piece) if pattern is None else remade(pattern, clone)
            self._copies[piece.size] = WorkingCopy(fresh)
        return self._copies[piece.size]

    def pattern(self, piece: Piece) -> nn.Module:
        """Return a model of a piece's shapes as it was built, to learn its cost from.

        Not the working copy: that may be frozen in parts, or hold activations.
        """
        if piece.size not in self._patterns:
            self._patterns[piece.size] = self.build(piece)
        return self._patterns[piece.size]

    def module(self, piece: Piece) -> nn.Module:
        """Return the working copy's model, to look at its structure."""
        return self.copy(piece).module

    # ---- what is cut

    @cached_property
    def traced(self) -> Channels | None:
        """What hangs together in the model that pieces are cut from; None if none are."""
        return None if self.kept(self.main) is None else self.task.channels

    def kept(self, piece: Piece) -> Kept | None:
        """Return the channels that a piece keeps; None if it is not cut out of a wider model."""
        return self.task.kept(piece.cut.get("width", 1.0))

    def cuts(self) -> Sequence[Piece]:
        """Return pieces that stand for all that a run cuts: they are checked before it begins."""
        return (self.main,)

    # ---- the server, for each device of a round

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Return what a device does in a round; raise BudgetTooSmall if it can do nothing."""
        stages = self.stages(round_index)
        return self.affordable(
            Plan(device.id, round_index, device.group, self.main, stages), device
        )

    def most(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the largest plan that a device may get in a round, where plans are drawn."""
        return self.plan(state, device, round_index)

    def stages(self, round_index: int) -> tuple[Stage, ...]:
        """Return the stages of a device that trains everything at once."""
        recipe = self.task.recipe
        return (Stage(recipe.lr_at(round_index, self.task.rounds), recipe.epochs),)

    def affordable(self, plan: Plan, device: Device) -> Plan:
        """Return the plan with its predicted peak; raise BudgetTooSmall if the device lacks it."""
        peak = max(self.footprint(plan.piece, stage).peak for stage in plan.stages)
        budget = None if self.ignores_budgets else device.memory
        if budget is not None and peak > budget:
            raise BudgetTooSmall(budget, peak, f"one training step of the {plan.piece.size} model")
        return replace(plan, budget=budget, predicted=peak)

    def footprint(self, piece: Piece, stage: Stage) -> Footprint:
        """Return the predicted bytes of one training step of a stage."""
        return self.cost(piece, stage).footprint

    def cost(self, piece: Piece, stage: Stage) -> Cost:
        """Return what one training step of a stage is predicted to take."""
        key = (piece.size, stage.trainable, stage.name)
        if key not in self._costs:
            pattern = self.pattern(piece)
            self._costs[key] = self.predicted(pattern, self.copy(piece).actual(stage))
        return self._costs[key]

    def predicted(self, module: nn.Module, stage: Stage) -> Cost:
        """Return what one training step of a stage on a model is predicted to take."""
        recipe = self.task.recipe
        return prediction.cost(
            module,
            *self.example(stage, recipe.batch),
            step=loop.make_step(recipe, self.objective(stage, None)),
            anchored=recipe.proximal > 0,
            optimizer=partial(make_optimizer, recipe, lr=stage.lr),
            trainable=stage.trainable,
        )

    def example(self, stage: Stage, batch: int) -> tuple[Any, Any]:
        """Return so many inputs of a stage and their targets, of which only the shapes matter."""
        return self.task.inputs(batch), self.task.targets(batch)

    def flops_per_sample(self, piece: Piece, stage: Stage) -> int:
        """Return the FLOPs of training on one sample in a stage."""
        return self.cost(piece, stage).flops // self.task.recipe.batch

    def view(self, piece: Piece) -> View:
        """Return which server tensors, and which entries of them, a piece consists of."""
        if piece.size not in self._views:
            module = self.module(piece)
            apart = norms.kept_apart(module, self.task.recipe.norm)
            self._views[piece.size] = norms.separate(
                whole(loop.own_tensors(module)), apart, piece.size
            )
        return self._views[piece.size]

    # ---- what travels beside the model

    def parcel(self, state: State, plan: Plan) -> Tensors:
        """Return what the server sends a device beside its view; `train` finds it there too."""
        return {}

    def given(self, plan: Plan, samples: int) -> Tensors:
        """Return the shapes of the parcel for a device with so many samples, on the meta device."""
        return {}

    def shared(self, plan: Plan, samples: int) -> Tensors:
        """Return the shapes of what such a device shares of its samples, on the meta device."""
        return {}

    def expected(self, plan: Plan) -> frozenset[str]:
        """Return the local names of the tensors that an update for a plan cannot do without."""
        copy = self.copy(plan.piece)
        names = copy.trained_names([copy.actual(stage) for stage in plan.stages])
        return frozenset(names).intersection(self.view(plan.piece))

    # ---- the device

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train what the plan says and return it. A pure function of its arguments.

        Args:
            plan: What to do.
            tensors: The device's view of the server's tensors, by local name, and its parcel.
            shard: Its data.
            memory: What it remembers from its last round; empty at first.
        """
        return self.fit(plan, tensors, shard)

    def fit(
        self,
        plan: Plan,
        tensors: Tensors,
        shard: Shard,
        anchor: Tensors | None = None,
        moments: Tensors | None = None,
    ) -> Update:
        """Train a plan's stages one after the other, from these tensors; pack up what learned.

        Args:
            plan: What to do.
            tensors: What the model starts from, by local name.
            shard: The device's data.
            anchor: Where a proximal term pulls, by local name; default: where the model starts.
            moments: What optimisers remember from earlier, to be changed. One then lasts over all
                stages, and what it remembers in the end is in the update's memory. Default: a fresh
                one for each stage.
        """
        copy = self.copy(plan.piece)
        module, stages = copy.load(tensors), [copy.actual(stage) for stage in plan.stages]
        recipe, seed = self.task.recipe, self.task.seed
        generator = rng.torch_generator(seed, "batches", plan.round, plan.device)
        kind = self.kind(plan, shard)
        # A meter that finds its budget crossed ends the device's work.
        meter = Meter(plan.budget) if self.trusted(plan, shard) is None else None
        with rng.seeded(seed, "dropout", plan.round, plan.device):
            train = partial(
                loop.fit,
                received=tensors if anchor is None else anchor,
                meter=meter,
                every_step=self.task.enforce or not self.steady,
            )
            data = self.data(plan, shard, generator, meter)
            steps, losses = 0, 0.0
            # Not in a loop over the data, which would hold a stage's beside that of the next one.
            for stage in stages:
                moments = loop.going_on(moments, stage)
                done = train(
                    module,
                    stage,
                    next(data),
                    recipe,
                    generator,
                    self.objective(stage, shard),
                    parameters=copy.ready(stage),
                    moments=moments,
                )
                steps, losses, moments = steps + done.steps, losses + done.loss_sum, done.moments
                del done  # Else all its moments would stay alive beside the next stage.
        if meter is not None:
            earlier = self._metered.get(kind, 0) if self.steady else 0
            self._metered[kind] = max(meter.peak, earlier)
        return Update(
            plan=plan,
            tensors=copy.trained(stages),
            samples=len(shard),
            steps=steps,
            loss=losses / max(steps, 1),
            peak_bytes=self._metered[kind],
            memory={f"{MOMENTS}{name}": tensor for name, tensor in (moments or {}).items()},
        )

    def trusted(self, plan: Plan, shard: Shard) -> int | None:
        """Return the peak of a device's work, if it need not be metered to be known.

        Peaks depend on shapes only: the first device of each kind is metered, and its figure serves
        the others, unless steps differ.
        """
        known = self._metered.get(self.kind(plan, shard)) if self.steady else None
        if known is None or self.task.enforce:
            return None
        return known if plan.budget is None or known <= plan.budget else None

    def kind(self, plan: Plan, shard: Shard) -> tuple[object, ...]:
        """Return a key that devices share whose work needs the same bytes."""
        full = min(len(shard), 2 * self.task.recipe.batch)
        return (plan.piece.size, *(stage.name for stage in plan.stages), full)

    def data(
        self, plan: Plan, shard: Shard, generator: torch.Generator, meter: Meter | None
    ) -> Iterator[Samples]:
        """Yield what each stage trains on; each is asked for when the stages before it are done."""
        return (shard for _ in plan.stages)

    def objective(self, stage: Stage, shard: Shard | None) -> Loss:
        """Return what a device minimises in a stage; without its data, the costliest of them."""
        return cross_entropy

    # ---- the server, after a round

    def check(self, state: State, update: Update) -> None:
        """Raise UpdateRefused unless an update is what its plan asked for."""
        view = with_rows(self.view(update.plan.piece), update.rows, state.tensors)
        check(update.tensors, view, state.tensors)
        check_shared(update.shared, self.shared(update.plan, update.samples))

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state. Updates arrive one by one and should not be collected."""
        mean = CoverageMean(state.tensors)
        for update in updates:
            view = with_rows(self.view(update.plan.piece), update.rows, state.tensors)
            mean.add(update.tensors, view, self.weight(update))
        coverage = {name: mean.covered(name) for name in self.parameters(state)}
        merged, moments = server_optimizers.apply(
            self.task.recipe, state.tensors, mean.result(), state.memory, coverage
        )
        return replace(state, tensors=merged, memory=moments)

    def weight(self, update: Update) -> float:
        """Return how much an update counts in the mean."""
        return float(update.samples) if self.task.recipe.weighting == "samples" else 1.0

    def parameters(self, state: State) -> list[str]:
        """Return the names of the server tensors that are parameters, not statistics."""
        view = self.view(self.main)
        main = [view[name].name for name, _ in self.module(self.main).named_parameters()]
        # What is kept apart for each size is the same parameter in all of them.
        names = {name.partition("@")[0] for name in main}
        return [name for name in state.tensors if name.partition("@")[0] in names]

    # ---- what people run

    def deploy(self, state: State) -> dict[str, Callable[[], nn.Module]]:
        """Return the models that people run, by size.

        Each is filled when it is asked for, and valid until the next one is.
        """
        return {piece.size: partial(self.filled, piece, state) for piece in self.pieces(state)}

    def owners(self, state: State) -> Mapping[str, int]:
        """Return whose memory deployed models are made from, by size; empty: the server has all."""
        return {}

    def pieces(self, state: State) -> Sequence[Piece]:
        """Return the pieces that people run, smallest first."""
        return (self.main,)

    def filled(self, piece: Piece, state: State) -> nn.Module:
        """Return the working copy of a piece with the server's tensors in it."""
        return self.copy(piece).load(cut(state.tensors, self.view(piece)))

    def headline(self, sizes: Mapping[str, float]) -> float:
        """Return the one accuracy to show for a run: that of the last deployed size."""
        return list(sizes.values())[-1]
