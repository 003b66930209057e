"""FeDepth: every device trains the full model, as many blocks at a time as its bytes hold.

Zhang, Liu, Chen, Chen, Wang: "Memory-adaptive Depth-wise Heterogeneous Federated Learning"
(https://arxiv.org/abs/2303.04887).

    device k:  cut the blocks 1..B, from the input on, into runs that fit its bytes
               for each run j in order:  E epochs on run j and the head, all before it frozen:
                   z <- frozen(stem, runs 1..j-1);  CE(head(link_j(run_j(z))), y)
    server:    w <- sum n_k w_k / sum n_k   over the devices that trained each tensor

link_j leads the hidden tensor to the head: striding and zero channels (`link = "pad"`), or a 1x1
convolution (`"conv"`). With `heads = "auxiliary"`, m-FeDepth, run j has a head of its own instead,
which lives on the server and is averaged over those who train it. The stem learns with run 1.

A block that does not fit alone is not trained by that device and not counted in the mean: images
pass through it (`skip = "pass"`) or around it (`"bypass"`, as in the public code). A device that
holds M > 1 whole models trains them together, each with a term KL(others || itself); the last may
be trained run by run. Only one is sent, the others stay with their device.

`data = "fresh"` draws and augments batches anew in each epoch; `"fixed"` once in a round;
`"buffered"` also keeps what frozen blocks make of them. The public code leaks momentum into frozen
blocks, and averages blocks that were not trained; we do neither.

Discloses: the trained weights of each device, to the server.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from sizewise import accounting, buffering, rng
from sizewise.anatomy import Anatomy
from sizewise.blockwise import Blocks, Blockwise, hidden_shapes
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.fleet import Device, ratio_of
from sizewise.method import Method
from sizewise.packing import Packing, pack_blocks
from sizewise.plan import Piece, Plan, Stage, Update
from sizewise.state import State
from sizewise.step import Loss, cross_entropy
from sizewise.structure import plain
from sizewise.task import Task
from sizewise.training import Samples, Shard, own_tensors
from sizewise.view import Slot, Tensors, View

PEERS = "peers."
TOLERANCE = 0.05
"""By how much the paper's decompositions exceed its budgets, by its own accounting."""

MICRO = 8
"""Where it saves memory, a frozen prefix runs in this many parts of a batch."""


class FeDepth(Method):
    """Depth-wise training of the full model."""

    @dataclass(frozen=True)
    class Options:
        """Options of FeDepth.

        Attributes:
            heads: Whether runs of blocks share the head through a link, or have heads of their own.
            link: What leads a hidden tensor to the head.
            skip: What happens to images at a block that does not fit.
            models: Most models that a device with room for them trains together.
            epochs: Whether `recipe.epochs` counts for each run of blocks or for all together.
            data: Whether batches are fresh in each epoch, fixed for a round, or buffered as well.
            assign: Whether a device's blocks must fit its bytes; or, to reproduce the paper, its
                ratio as the fleet gives it, by the paper's accounting and with 5 % to spare.
        """

        heads: Literal["skip", "auxiliary"] = "skip"
        link: Literal["pad", "conv"] = "pad"
        skip: Literal["pass", "bypass"] = "pass"
        models: int = 2
        epochs: Literal["per_block", "total"] = "per_block"
        data: Literal["fresh", "fixed", "buffered"] = "fresh"
        assign: Literal["bytes", "ratio"] = "bytes"

        def __post_init__(self) -> None:
            if self.models < 1:
                raise ConfigError(f"method.models must be at least 1, not {self.models}")

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self.ignores_budgets = self.options.assign == "ratio"
        self._schedules: dict[float | None, _Schedule] = {}

    # ---- the model, taken apart

    @cached_property
    def parts(self) -> Anatomy:
        """Stem, blocks and head of the model."""
        model = self.task.build()
        parts = self.task.anatomy(model)
        parts.check(model, torch.zeros(2, *self.task.image))
        return parts

    @cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of a sample after the stem and after each block."""
        return hidden_shapes(self.task.build().eval(), self.parts, self.task.image)

    def build(self, piece: Piece) -> nn.Module:
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
            if self.options.heads == "skip":
                stride = shape[1] // last[1]
                return nn.Conv2d(shape[0], last[0], 1, stride, bias=False)
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

    def view(self, piece: Piece) -> View:
        """Return where a device's tensors live: peers live nowhere but with it."""
        if not piece.cut:
            return super().view(piece)
        main = super().view(self.main)
        names = [n for n in own_tensors(self.module(piece)) if not n.startswith(PEERS)]
        inner = {name: name.partition(".")[2] for name in names if name.startswith("model.")}
        return {name: main[inner[name]] if name in inner else Slot(name) for name in names}

    # ---- the server

    def setup(self) -> State:
        """Return the model, and every way out with weights that some device of the fleet uses."""
        state = super().setup()
        tensors = dict(state.tensors)
        by_ratio = self.options.assign == "ratio"
        for capacity in self.task.ratios if by_ratio else self.task.budgets:
            try:
                piece = self._schedule(capacity).piece
            except BudgetTooSmall:
                continue
            fresh = own_tensors(self.build(piece))
            for local, slot in self.view(piece).items():
                if slot.name not in tensors:
                    tensors[slot.name] = fresh[local].detach().clone()
        return replace(state, tensors=tensors)

    def parameters(self, state: State) -> list[str]:
        """Return the names of the parameters, those of exits included."""
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        exits = [n for n in state.tensors if n.startswith("exits.") and not n.endswith(statistics)]
        return [*super().parameters(state), *exits]

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device as many blocks at a time, or as many models, as its bytes hold."""
        capacity: float | None = device.memory
        if self.options.assign == "ratio":
            capacity, device = ratio_of(device), replace(device, memory=None)
        schedule = self._schedule(capacity)
        (whole,) = self.stages(round_index)
        epochs = whole.epochs
        if self.options.epochs == "total":
            epochs = max(1, epochs // len(schedule.stages))
        stages = tuple(replace(stage, lr=whole.lr, epochs=epochs) for stage in schedule.stages)
        plan = Plan(device.id, round_index, device.group, schedule.piece, stages)
        return self.affordable(plan, device)

    def _schedule(self, capacity: float | None) -> "_Schedule":
        """Return what a device with so many bytes, or such a ratio, trains, in which order."""
        if capacity not in self._schedules:
            if capacity is None:
                schedule = self._regular(0)
            elif self.options.assign == "ratio":
                schedule = self._published(capacity)
            elif self._peak(self._regular(0)) <= capacity:
                schedule = self._together(int(capacity))
            else:
                schedule = self._runs(int(capacity))
            self._schedules[capacity] = schedule
        return self._schedules[capacity]

    def _peak(self, schedule: "_Schedule") -> int:
        return max(self.footprint(schedule.piece, stage).peak for stage in schedule.stages)

    # ---- who trains what

    def _runs(self, memory: int) -> "_Schedule":
        """Return the decomposition for a device that cannot hold the whole model."""
        skipped = self._bypassed(memory)

        def stage(start: int, stop: int) -> _Schedule:
            return self._run(memory, start, stop, skipped)

        return _in_order([stage(run.start, run.stop) for run in self._pack(memory, stage).stages])

    def _bypassed(self, memory: int) -> tuple[int, ...]:
        """Return the blocks that do not fit alone and are not even run."""
        found: tuple[int, ...] = ()
        if self.options.skip == "bypass":
            for number in range(len(self.parts.blocks)):
                if self._peak(self._run(memory, number, number + 1, found)) > memory:
                    found += (number,)
        return found

    def _run(
        self, memory: int | None, start: int, stop: int, bypassed: Sequence[int]
    ) -> "_Schedule":
        """Return the stage that trains blocks start, ..., stop - 1."""
        frozen = tuple(number for number in range(start) if number not in bypassed)
        # The gradient of the stem would need the activations of the blocks after it.
        stem = not frozen
        buffered = self.options.data == "buffered" and not stem
        blocks = Blocks(tuple(range(start, stop)), frozen, stem, buffered)
        stage = self._staged(blocks)
        if memory is None or stem or buffered or not self._separable:
            return stage
        if self._peak(stage) <= memory:
            return stage
        return self._staged(replace(blocks, micro=max(1, self.task.recipe.batch // MICRO)))

    @cached_property
    def _separable(self) -> bool:
        """Whether a sample's hidden tensors do not depend on the batch it is in."""
        layers = self.module(self.main).modules()
        return not any(isinstance(x, _BatchNorm) and x.running_mean is None for x in layers)

    def _pack(self, memory: int, stage: "Callable[[int, int], _Schedule]") -> Packing:
        return pack_blocks(lambda i, j: self._peak(stage(i, j)), len(self.parts.blocks), memory)

    def _together(self, memory: int) -> "_Schedule":
        """Return the schedule of a device that holds the whole model, perhaps several."""
        count = 0
        while count + 1 < self.options.models and self._peak(self._regular(count + 1)) <= memory:
            count += 1
        if count + 1 == self.options.models:
            return self._regular(count)
        # What is left may hold one more, trained run by run beside the others. Together they need
        # no more than the sum of what each needs alone, give or take a few logits.
        left = memory - self._peak(self._regular(count))
        try:
            packing = self._pack(left, lambda i, j: self._run(left, i, j, ()))
        except BudgetTooSmall:
            return self._regular(count)
        mixed = _in_order([self._mixed(count, run.start, run.stop) for run in packing.stages])
        if packing.skipped or self._peak(mixed) > memory:
            return self._regular(count)
        return mixed

    def _published(self, ratio: float) -> "_Schedule":
        """Return the decomposition that the paper's accounting gives for a ratio."""
        model, batch = self.task.build(), (self.task.recipe.batch, *self.task.image)
        counted = accounting.summary(model, torch.empty(batch, device="meta"), self.parts)
        whole = int(ratio + 1e-9)
        if ratio - whole < 1e-9 or whole >= self.options.models:
            return self._regular(min(whole, self.options.models) - 1)
        packing = pack_blocks(
            counted.stage, len(counted.blocks), (ratio - whole) * counted.total, TOLERANCE
        )
        runs = packing.stages
        if whole:
            return _in_order([self._mixed(whole - 1, run.start, run.stop) for run in runs])
        bypassed = packing.skipped if self.options.skip == "bypass" else ()
        return _in_order([self._run(None, run.start, run.stop, bypassed) for run in runs])

    def _regular(self, peers: int) -> "_Schedule":
        """Return one stage that trains the whole model together with so many like it."""
        if not peers:
            return _Schedule(self.main, self.stages(0))
        whole = Blocks(tuple(range(len(self.parts.blocks))))
        return _in_order([self._staged(whole, [whole] * peers)])

    def _mixed(self, peers: int, start: int, stop: int) -> "_Schedule":
        """Return a stage that trains whole models, and blocks of one more beside them."""
        whole = Blocks(tuple(range(len(self.parts.blocks))))
        run = Blocks(tuple(range(start, stop)), tuple(range(start)), start == 0)
        return self._staged(whole, [*[whole] * peers, run])

    def _staged(self, blocks: Blocks, peers: Sequence[Blocks] = ()) -> "_Schedule":
        """Return one stage, on a piece that has all ways out.

        Which ones a device needs is known only when all its stages are; with fewer, they need less.
        """
        trainable = list(self._names("model", blocks))
        for number, other in enumerate(peers):
            trainable += self._names(f"{PEERS}{number}", other)
        name = " + ".join(part.name for part in (blocks, *peers))
        cut = {"blocks": plain(blocks), "peers": plain(list(peers))}
        exits = [n for n in range(1, len(self.shapes)) if self._has_exit(n)] if not peers else []
        piece = Piece(f"any blocks, {len(peers)} peers", {"exits": exits, "peers": len(peers)})
        return _Schedule(piece, (Stage(1.0, 1, tuple(trainable), name, cut),))

    def _has_exit(self, stop: int) -> bool:
        """Return whether there are weights between so many blocks and the logits or the head."""
        if stop == len(self.parts.blocks):
            return False
        if self.options.heads == "auxiliary":
            return True
        return self.options.link == "conv" and self.shapes[stop] != self.shapes[-1]

    def _names(self, model: str, blocks: Blocks) -> Iterator[str]:
        """Yield the prefixes of the names of what learns."""
        yield from (f"{model}.{self.parts.blocks[number]}" for number in blocks.learn)
        if blocks.stem:
            yield from (f"{model}.{path}" for path in self.parts.stem)
        own = model == "model" and self._has_exit(blocks.stop)
        if own:
            yield f"exits.{blocks.stop}"
        if not own or self.options.heads == "skip":
            yield from (f"{model}.{path}" for path in self.parts.head)

    # ---- the device

    def sample_shape(self, stage: Stage) -> tuple[int, ...]:
        """Return the shape of one input: an image, or what frozen blocks make of it."""
        if not stage.cut.get("blocks", {}).get("buffered"):
            return self.task.image
        frozen = stage.cut["blocks"]["frozen"]
        return tuple(self.shapes[frozen[-1] + 1 if frozen else 0])

    def objective(self, stage: Stage, shard: Shard | None) -> Loss:
        """Return the cross entropy behind a stage's way out; with peers, of all that learn."""
        if not stage.cut:
            return cross_entropy
        blocks = Blocks.read(stage.cut["blocks"])
        peers = tuple(Blocks.read(cut) for cut in stage.cut["peers"])
        return partial(mutual, blocks=blocks, peers=peers)

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train; peers go on from what the device remembers, at first from what it received."""
        names = [n for n in own_tensors(self.module(plan.piece)) if n.startswith(PEERS)]
        if not names:
            return self.fit(plan, tensors, shard)
        start = {n: memory.get(n, tensors["model." + n.split(".", 2)[2]]) for n in names}
        update = self.fit(plan, {**tensors, **start}, shard)
        own = own_tensors(self.module(plan.piece))
        return replace(
            update,
            tensors={n: t for n, t in update.tensors.items() if not n.startswith(PEERS)},
            memory={name: own[name].detach().clone() for name in names},
        )

    def data(self, plan: Plan, shard: Shard, generator: torch.Generator) -> Iterator[Samples]:
        """Yield what each stage trains on: the shard, or buffers that follow the frozen blocks."""
        if self.options.data == "fresh" or not plan.stages[0].cut:
            yield from super().data(plan, shard, generator)
            return
        module: Any = self.module(plan.piece)
        recipe = self.task.recipe
        batch, drop = recipe.batch, recipe.drop_last
        with tempfile.TemporaryDirectory() as folder:
            room = self._room(plan, plan.stages[0], ())
            images = buffer = buffering.fixed(
                shard, batch, generator, room, Path(folder), drop_last=drop
            )
            done: tuple[int, ...] | None = None
            for stage in plan.stages:
                blocks = Blocks.read(stage.cut["blocks"])
                if not blocks.buffered:
                    yield images
                    continue
                module.eval()
                room = self._room(plan, stage, buffer.held)
                buffer = buffer.through(partial(module.on, blocks=blocks, done=done), room)
                done = blocks.frozen
                yield buffer

    def _room(self, plan: Plan, stage: Stage, held: Sequence[Tensor]) -> float:
        """Return the bytes that a stage leaves of a device's budget."""
        if plan.budget is None:
            return float("inf")
        used = sum(tensor.nbytes for tensor in held)
        return plan.budget - used - self.footprint(plan.piece, stage).peak


@dataclass(frozen=True)
class _Schedule:
    """What a kind of device trains: its piece, and stages in order."""

    piece: Piece
    stages: tuple[Stage, ...]


def _in_order(schedules: Sequence[_Schedule]) -> _Schedule:
    """Return one schedule out of several, one after the other on a piece made for them."""
    stages = tuple(stage for schedule in schedules for stage in schedule.stages)
    used = {Blocks.read(stage.cut["blocks"]).stop for stage in stages}
    cut = schedules[0].piece.cut
    size = "blocks " + " | ".join(stage.name for stage in stages)
    return _Schedule(Piece(size, {**cut, "exits": sorted(used & set(cut["exits"]))}), stages)


def mutual(
    module: Blockwise, inputs: Tensor, labels: Tensor, blocks: Blocks, peers: tuple[Blocks, ...]
) -> Tensor:
    """Return the sum of all models' losses: CE(z_i, y) + mean over j of KL(p_j || p_i)."""
    logits = [module(inputs, blocks)]
    logits += [
        module(inputs, other, model) for model, other in zip(module.peers, peers, strict=True)
    ]
    total = F.cross_entropy(logits[0], labels)
    for own in logits[1:]:
        total = total + F.cross_entropy(own, labels)
    for own in logits:
        others = [other.detach().softmax(1) for other in logits if other is not own]
        for other in others:
            divergence = F.kl_div(own.log_softmax(1), other, reduction="batchmean")
            total = total + divergence / len(others)
    return total
