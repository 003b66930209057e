"""FeDepth: every device trains the full model, as many blocks at a time as its bytes hold.

Zhang, Dai, Wang, Xing, Chen, Sun: "Memory-adaptive Depth-wise Heterogeneous Federated Learning"
(https://arxiv.org/abs/2303.04887).

    device k:  cut the blocks 1..B, from the input on, into runs that fit its bytes
               for each run j in order:  E epochs on run j and the head, all before it frozen:
                   z <- frozen(stem, runs 1..j-1);  CE(head(link_j(run_j(z))), y)
    server:    w <- sum n_k w_k / sum n_k   over the devices that trained each tensor

link_j leads the hidden tensor to the head: striding and zero channels (`link = "pad"`), or a 1x1
convolution (`"conv"`). With `heads = "auxiliary"`, m-FeDepth, run j has a head of its own instead,
which lives on the server and is averaged over those who train it. The stem learns with block 1.

A block that does not fit alone is not trained by that device and not counted in the mean: images
pass through it (`skip = "pass"`) or around it (`"bypass"`, as in the public code). A device that
holds M > 1 whole models trains them together, each with a term KL(others || itself); the last may
be trained run by run. Only one is sent, the others stay with their device.

`data = "fresh"` draws and augments batches anew in each epoch; `"fixed"` once in a round;
`"buffered"` also keeps what frozen blocks make of them. The public code has one optimiser for all
runs of a device (`optimizers = "round"`); here each run has a fresh one until that is asked for. It
also leaks momentum into frozen blocks, and averages blocks that were not trained; we do neither.

Discloses: the trained weights of each device, to the server.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, Submodel, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors
from sizewise.families.base import Method
from sizewise.families.options import possible
from sizewise.fleet.devices import Device
from sizewise.memory.prediction import Cost, Meter, predict
from sizewise.methods.fedepth.blocks import (
    PEERS,
    Blocks,
    BlockSubmodels,
    Blockwise,
    Frozen,
    Run,
    TakenApart,
)
from sizewise.methods.fedepth.schedule import ScheduleOptions, Scheduler
from sizewise.steps.mutual import mutual_learning
from sizewise.steps.step import Loss, cross_entropy
from sizewise.torch_tools.placement import taken_out
from sizewise.training import buffering
from sizewise.training.loop import Samples, Shard, own_tensors, workload


class FeDepth(Method):
    """Depth-wise training of the full model."""

    submodel_type: type[TakenApart] = TakenApart
    work_type: type[Run] = Run

    @dataclass(frozen=True)
    class Options(ScheduleOptions):
        """Options of FeDepth.

        Attributes:
            epochs: Whether `recipe.epochs` counts for each run of blocks or for all together, which
                then share their batches equally.
            optimizers: Whether each run of blocks has a fresh optimiser or, as in the public code,
                one lasts for a device's round, so that the head keeps its momentum.
        """

        epochs: Literal["per_block", "total"] = "per_block"
        optimizers: Literal["stage", "round"] = "stage"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.optimizers == "round" and self.data == "buffered":
                raise ConfigError(
                    "method.optimizers = 'round' keeps momentum while buffers are filled, which no "
                    "budget counts; use method.data = 'fixed' or 'fresh' with it"
                )

    options: Options

    @cached_property
    def submodels(self) -> BlockSubmodels:
        """The model, as it is or taken apart."""
        return BlockSubmodels(self.task, self.options.heads, self.options.link)

    @cached_property
    def scheduler(self) -> Scheduler:
        """Finds what fits a device."""
        return Scheduler(self.submodels, self.options, self.peak, self.levers.least)

    # ---- the server

    def trained(self) -> Sequence[Submodel]:
        """Return what devices take apart: the server has every way out that some device uses."""
        capacities = self.options.capacities(self.task)
        return [found.submodel for found in possible(self.scheduler.schedule, capacities)]

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device as many blocks at a time, or as many models, as its bytes hold."""
        schedule = self.scheduler.schedule(self.options.capacity(device))
        whole = self.task.stage(round_index)
        runs = len(schedule.stages) if self.options.epochs == "total" else 1
        stages = (
            replace(stage, lr=whole.lr, epochs=whole.epochs, part=(number % runs, runs))
            for number, stage in enumerate(schedule.stages)
        )
        return self.offer(device, round_index, schedule.submodel, *stages)

    def cost(self, submodel: Submodel, stage: TrainingStage) -> Cost:
        """Return what a step takes; a buffered stage also has to fill its buffer."""
        training, blocks = self._training(submodel, stage), _blocks(stage)
        if blocks is None or not blocks.buffered:
            return training
        filling = max(self._filling(submodel, number) for number in (-1, *blocks.frozen))
        peak = max(training.footprint.peak, filling)
        return replace(training, footprint=replace(training.footprint, peak=peak))

    def _training(self, submodel: Submodel, stage: TrainingStage) -> Cost:
        """Return what a step takes: what it takes without idle ways out, and their bytes.

        Schedules differ in the ways out that they hold, and a step uses one of them: so there are
        far fewer steps to look into than schedules.
        """
        needed = self.submodels.without_idle_exits(submodel, _blocks(stage))
        step = super().cost(needed, stage)
        if needed == submodel:
            return step
        return step.beside(self.costs.resident(submodel) - self.costs.resident(needed))

    def _filling(self, submodel: Submodel, number: int) -> int:
        """Return the bytes of passing a batch through a frozen block, or, for -1, the stem."""
        batch = self.task.recipe.batch
        inputs = self.task.inputs(batch) if number < 0 else self._hidden(batch, number)
        part = Frozen(self.submodels.pattern(submodel), number)
        device = torch.device(self.task.predicted_for)
        return predict(part, inputs, training=False, device=device).peak

    # ---- the device

    def example(self, submodel: Any, stage: TrainingStage, batch: int) -> tuple[Any, Any]:
        """Return the shapes of samples, or of what frozen blocks make of them, and of targets."""
        inputs, targets = super().example(submodel, stage, batch)
        blocks = _blocks(stage)
        if blocks is None or not blocks.buffered:
            return inputs, targets
        return self._hidden(batch, blocks.frozen[-1] + 1 if blocks.frozen else 0), targets

    def _hidden(self, batch: int, number: int) -> Tensor:
        """Return the shape of a batch before a block."""
        return torch.empty((batch, *self.task.hidden_shapes[number]), device="meta")

    def loss(self, submodel: Any, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the cross entropy behind a stage's way out; with peers, of all that learn."""
        if not isinstance(stage.work, Run) or stage.work.blocks is None:
            return cross_entropy
        return partial(mutual, run=stage.work)

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, device_state: Tensors) -> Update:
        """Train; peers go on from what the device remembers, at first from what it received."""
        own = own_tensors(self.submodels.module(plan.submodel))
        peers = [name for name in own if name.startswith(PEERS)]
        start = {n: device_state.get(n, tensors["model." + n.split(".", 2)[2]]) for n in peers}
        # Bytes depend, beside the stages, on what a device holds, which goes by its room. A part of
        # the batches may be a single one, which finds no optimiser's state in place.
        held = () if self.options.data == "fresh" else (len(shard), plan.budget)
        steps = (min(workload(s, len(shard), self.task.recipe)[0], 2) for s in plan.stages)
        update = self.trainer.fit(
            plan,
            {**tensors, **start},
            shard,
            partial(self.loss, plan.submodel, shard=shard),
            data=None if self.options.data == "fresh" else partial(self._data, plan, shard),
            moments={} if self.options.optimizers == "round" else None,
            kind=(*held, *steps),
        )
        own = own_tensors(self.submodels.module(plan.submodel))
        return replace(
            update,
            tensors={n: t for n, t in update.tensors.items() if not n.startswith(PEERS)},
            device_state={name: taken_out(own[name]) for name in peers},
        )

    def _data(
        self, plan: Plan, shard: Shard, generator: torch.Generator, meter: Meter | None
    ) -> Iterator[Samples]:
        """Yield what each stage trains on: fixed batches, or what frozen blocks make of them."""
        module: Any = self.submodels.module(plan.submodel)
        recipe = self.task.recipe
        with tempfile.TemporaryDirectory() as folder:
            buffer = buffering.fixed(
                shard,
                recipe.batch,
                generator,
                self._room(plan, plan.stages, ()),
                Path(folder),
                drop_last=recipe.drop_last,
            )
            done: list[int] = []
            for stage in plan.stages:
                blocks = _blocks(stage)
                if blocks is None or not blocks.buffered:
                    yield buffer  # No stage before it was buffered: these are still the images.
                    continue
                module.eval()
                module.zero_grad(set_to_none=True)  # What the stage before left is not needed.
                for number in (-1, *blocks.frozen)[len(done) :]:
                    room = self._room(plan, [stage], buffer.held)
                    part = partial(module.part, number=number)
                    buffer = buffer.through(module, part, room, meter)
                    done.append(number)
                yield buffer

    def _room(self, plan: Plan, stages: Sequence[TrainingStage], held: Sequence[Tensor]) -> float:
        """Return the bytes that some stages leave of a device's budget, each of them."""
        if plan.budget is None:
            return float("inf")
        used = sum(tensor.untyped_storage().nbytes() for tensor in held)
        return plan.budget - used - max(self.peak(plan.submodel, stage) for stage in stages)


def _blocks(stage: TrainingStage) -> Blocks | None:
    """Return what a stage does with the model's blocks; None if it trains the model as it is."""
    return stage.work.blocks if isinstance(stage.work, Run) else None


def mutual(module: Blockwise, inputs: Tensor, labels: Tensor, run: Run) -> Tensor:
    """Return the sum of all models' losses: CE(z_i, y) + mean over j of KL(p_j || p_i)."""
    models = zip((module.model, *module.peers), (run.blocks, *run.peers), strict=True)
    logits = [module(inputs, blocks, model) for model, blocks in models]
    return mutual_learning(logits, labels)
