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
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.common import rng
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Submodel, Plan, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import TensorSlice, Tensors, View
from sizewise.families.depthwise import PEERS, Depthwise
from sizewise.fleet.devices import Device, ratio_of
from sizewise.memory.prediction import Cost, Footprint, Meter, predict
from sizewise.steps.step import Loss, compare, cross_entropy
from sizewise.surgery.blockwise import Blocks, Blockwise, Frozen, strides
from sizewise.training import buffering
from sizewise.training.loop import Samples, Shard, own_tensors, workload
from sizewise.training.task import Task


class FeDepth(Depthwise):
    """Depth-wise training of the full model."""

    @dataclass(frozen=True)
    class Options(Depthwise.Options):
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

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self._fillings: dict[tuple[str, int], int] = {}

    # ---- the model, taken apart

    def build(self, piece: Submodel) -> nn.Module:
        """Build the model; for devices that take it apart, with ways out and peers."""
        model = self.task.build()
        if not piece.cut:
            return model
        exits = {stop: self._exit(stop) for stop in piece.cut["exits"]}
        peers = [self.task.build() for _ in range(piece.cut["peers"])]
        links = self.options.heads == "skip"
        return Blockwise(model, self.parts, self.shapes, exits, links, peers)

    def _exit(self, stop: int) -> nn.Module:
        """Return a new way out after so many blocks: an auxiliary head, or a 1x1 convolution."""
        shape, last = self.shapes[stop], self.shapes[-1]
        with rng.seeded(self.task.seed, "exit", stop):
            if len(shape) == 1:  # Features of a perceptron, not of an image.
                to_head = self.options.heads == "skip"
                return nn.Linear(shape[0], last[0] if to_head else self.task.classes, not to_head)
            if self.options.heads == "skip":
                return nn.Conv2d(shape[0], last[0], 1, strides(shape, last), bias=False)
            if len(shape) != 3:  # Tokens keep their shape, so the model's own head fits.
                model = self.task.build(draw=stop)
                return nn.Sequential(*(model.get_submodule(path) for path in self.parts.head))
            return nn.Sequential(
                self.task.norm(shape[0]),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(shape[0], self.task.classes),
            )

    def view(self, piece: Submodel) -> View:
        """Return where a device's tensors live: peers live nowhere but with it."""
        if not piece.cut:
            return super().view(piece)
        main = super().view(self.main)
        names = [n for n in own_tensors(self.module(piece)) if not n.startswith(PEERS)]
        inner = {name: name.partition(".")[2] for name in names if name.startswith("model.")}
        return {name: main[inner[name]] if name in inner else TensorSlice(name) for name in names}

    # ---- the server

    def setup(self) -> State:
        """Return the model, and every way out with weights that some device of the fleet uses."""
        pieces = []
        by_ratio = self.options.assign == "ratio"
        for capacity in self.task.ratios if by_ratio else self.task.budgets:
            try:
                pieces.append(self.schedule(capacity).piece)
            except BudgetTooSmall:
                continue  # Such a device is refused, and named, in the rounds that ask it.
        return self.extended(super().setup(), pieces)

    def parameters(self, state: State) -> list[str]:
        """Return the names of the parameters, those of exits included."""
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        exits = [n for n in state.tensors if n.startswith("exits.") and not n.endswith(statistics)]
        return [*super().parameters(state), *exits]

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device as many blocks at a time, or as many models, as its bytes hold."""
        capacity: float | None = device.memory
        if self.options.assign == "ratio":
            capacity = ratio_of(device)
        schedule = self.schedule(capacity)
        (whole,) = self.stages(round_index)
        runs = len(schedule.stages) if self.options.epochs == "total" else 1
        stages = tuple(
            replace(stage, lr=whole.lr, epochs=whole.epochs, part=(number % runs, runs))
            for number, stage in enumerate(schedule.stages)
        )
        plan = Plan(device.id, round_index, device.group, schedule.piece, stages)
        return self.affordable(plan, device)

    def cost(self, piece: Submodel, stage: TrainingStage) -> Cost:
        """Return what a step of a stage takes."""
        if piece.cut and not piece.cut["exits"]:
            # All such pieces hold the same tensors, whatever their stages are.
            piece = replace(piece, size=f"{piece.cut['peers']} peers")
        return super().cost(piece, stage)

    def footprint(self, piece: Submodel, stage: TrainingStage) -> Footprint:
        """Return the bytes of a stage; a buffered one also has to fill its buffer."""
        training = super().footprint(piece, stage)
        if not stage.cut.get("blocks", {}).get("buffered"):
            return training
        blocks = Blocks.read(stage.cut["blocks"])
        filling = max(self._filling(piece, number) for number in (-1, *blocks.frozen))
        return replace(training, peak=max(training.peak, filling))

    def _filling(self, piece: Submodel, number: int) -> int:
        """Return the bytes of passing a batch through a frozen block, or, for -1, the stem."""
        key = (piece.size, number)
        if key not in self._fillings:
            batch = self.task.recipe.batch
            inputs = self.task.inputs(batch) if number < 0 else self._hidden(batch, number)
            part = Frozen(self.pattern(piece), number)
            self._fillings[key] = predict(part, inputs, training=False).peak
        return self._fillings[key]

    # ---- the device

    def example(self, stage: TrainingStage, batch: int) -> tuple[Any, Any]:
        """Return the shapes of samples, or of what frozen blocks make of them, and of targets."""
        inputs, targets = super().example(stage, batch)
        if not stage.cut.get("blocks", {}).get("buffered"):
            return inputs, targets
        frozen = stage.cut["blocks"]["frozen"]
        return self._hidden(batch, frozen[-1] + 1 if frozen else 0), targets

    def _hidden(self, batch: int, number: int) -> Tensor:
        """Return the shape of a batch before a block."""
        return torch.empty((batch, *self.shapes[number]), device="meta")

    def objective(self, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the cross entropy behind a stage's way out; with peers, of all that learn."""
        if not stage.cut:
            return cross_entropy
        blocks = Blocks.read(stage.cut["blocks"])
        peers = tuple(Blocks.read(cut) for cut in stage.cut["peers"])
        return partial(mutual, blocks=blocks, peers=peers)

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train; peers go on from what the device remembers, at first from what it received."""
        names = [n for n in own_tensors(self.module(plan.piece)) if n.startswith(PEERS)]
        moments: Tensors | None = {} if self.options.optimizers == "round" else None
        if not names:
            return replace(self.fit(plan, tensors, shard, moments=moments), memory={})
        start = {n: memory.get(n, tensors["model." + n.split(".", 2)[2]]) for n in names}
        update = self.fit(plan, {**tensors, **start}, shard, moments=moments)
        own = own_tensors(self.module(plan.piece))
        return replace(
            update,
            tensors={n: t for n, t in update.tensors.items() if not n.startswith(PEERS)},
            memory={name: own[name].detach().clone() for name in names},
        )

    def kind(self, plan: Plan, shard: Shard) -> tuple[object, ...]:
        """Return a key of devices with equal needs: what a device holds depends on its room."""
        held = () if self.options.data == "fresh" else (len(shard), plan.budget)
        # A part of the batches may be a single one, which finds no optimiser's state in place.
        steps = (min(workload(s, len(shard), self.task.recipe)[0], 2) for s in plan.stages)
        return (*super().kind(plan, shard), *held, *steps)

    def data(
        self, plan: Plan, shard: Shard, generator: torch.Generator, meter: Meter | None
    ) -> Iterator[Samples]:
        """Yield what each stage trains on: the shard, or buffers that follow the frozen blocks."""
        if self.options.data == "fresh":
            yield from super().data(plan, shard, generator, meter)
            return
        module: Any = self.module(plan.piece)
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
                if not stage.cut or not (blocks := Blocks.read(stage.cut["blocks"])).buffered:
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
        return plan.budget - used - max(self.footprint(plan.piece, s).peak for s in stages)


def mutual(
    module: Blockwise, inputs: Tensor, labels: Tensor, blocks: Blocks, peers: tuple[Blocks, ...]
) -> Tensor:
    """Return the sum of all models' losses: CE(z_i, y) + mean over j of KL(p_j || p_i)."""
    logits = [module(inputs, blocks)]
    logits += [
        module(inputs, other, model) for model, other in zip(module.peers, peers, strict=True)
    ]
    total = compare(logits[0], labels)
    for own in logits[1:]:
        total = total + compare(own, labels)
    for own in logits:
        others = [other.detach().softmax(-1) for other in logits if other is not own]
        for other in others:
            divergence = F.kl_div(own.log_softmax(-1), other, reduction="batchmean")
            total = total + divergence / len(others)
    return total
