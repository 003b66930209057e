"""Run by run: the base of methods whose devices train a model some blocks at a time.

A device's bytes decide how its blocks are divided: into the longest runs, from the input on, that
can be trained with everything before them frozen. A device that holds the whole model trains it at
once, and with more room several of them, the last perhaps run by run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from sizewise.common.structure import plain
from sizewise.errors import BudgetTooSmall, ConfigError, ModelError
from sizewise.exchange.plan import Piece, Stage
from sizewise.families.base import Method
from sizewise.memory import accounting
from sizewise.memory.packing import Packing, pack_blocks
from sizewise.surgery import norms
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.blockwise import Blocks
from sizewise.training.task import Task

PEERS = "peers."
"""Where further models are in a device's module."""

TOLERANCE = 0.05
"""By how much the paper's decompositions exceed its budgets, by its own accounting."""

MICRO = 8
"""Where it saves memory, a frozen prefix runs in this many parts of a batch."""


@dataclass(frozen=True)
class Schedule:
    """What a kind of device trains: its piece, and stages in order."""

    piece: Piece
    stages: tuple[Stage, ...]


class Depthwise(Method):
    """FedAvg, run by run of blocks."""

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of all methods that train blocks in turn.

        Attributes:
            heads: Whether runs of blocks share the head through a link, or have heads of their own.
            link: What leads a hidden tensor to the head.
            skip: What happens to images at a block that does not fit.
            models: Most models that a device whose bytes hold them trains together; a device of
                unlimited memory trains one.
            data: Whether batches are fresh in each epoch, fixed for a round, or buffered as well.
            assign: Whether a device's blocks must fit its bytes; or, to reproduce the paper, its
                ratio as the fleet gives it, by the paper's accounting and with 5 % to spare.
        """

        heads: Literal["skip", "auxiliary"] = "skip"
        link: Literal["pad", "conv"] = "pad"
        skip: Literal["pass", "bypass"] = "pass"
        models: int = 2
        data: Literal["fresh", "fixed", "buffered"] = "fresh"
        assign: Literal["bytes", "ratio"] = "bytes"

        def __post_init__(self) -> None:
            if self.models < 1:
                raise ConfigError(f"method.models must be at least 1, not {self.models}")
            if self.link == "conv" and self.heads == "auxiliary":
                raise ConfigError(
                    "method.link = 'conv' leads to the model's head, and with auxiliary heads runs "
                    "of blocks do not use it; set method.heads to 'skip' or leave the link out"
                )

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self.ignores_budgets = self.options.assign == "ratio"
        self._schedules: dict[float | None, Schedule] = {}

    @cached_property
    def parts(self) -> Anatomy:
        """Stem, blocks and head of the model."""
        parts = self.task.anatomy(self.task.build())
        if not parts.blocks:
            raise ModelError(
                f"{self.task.model.name!r} has no blocks between stem and head to train in turn; "
                "name them in model.anatomy, or choose another method"
            )
        return parts

    def schedule(self, capacity: float | None) -> Schedule:
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

    def _peak(self, schedule: Schedule) -> int:
        return max(self.footprint(schedule.piece, stage).peak for stage in schedule.stages)

    def _runs(self, memory: int) -> Schedule:
        """Return the decomposition for a device that cannot hold the whole model."""
        skipped = self._bypassed(memory)

        def stage(start: int, stop: int) -> Schedule:
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

    def _run(self, memory: int | None, start: int, stop: int, bypassed: Sequence[int]) -> Schedule:
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
        return not norms.uses_batch_statistics(self.pattern(self.main))

    def _pack(self, memory: int, stage: Callable[[int, int], Schedule]) -> Packing:
        return pack_blocks(lambda i, j: self._peak(stage(i, j)), len(self.parts.blocks), memory)

    def _together(self, memory: int) -> Schedule:
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

    def _published(self, ratio: float) -> Schedule:
        """Return the decomposition that the paper's accounting gives for a ratio."""
        inputs = self.task.inputs(self.task.recipe.batch)
        counted = accounting.summary(self.task.build(), inputs, self.parts)
        whole = int(ratio + 1e-9)
        if ratio - whole < 1e-9 or whole >= self.options.models:
            return self._regular(min(whole, self.options.models) - 1)
        packing = pack_blocks(
            counted.stage, len(counted.blocks), (ratio - whole) * counted.total, TOLERANCE
        )
        runs = packing.stages
        if whole and packing.skipped:
            return self._regular(whole - 1)
        if whole:
            return _in_order([self._mixed(whole - 1, run.start, run.stop) for run in runs])
        bypassed = packing.skipped if self.options.skip == "bypass" else ()
        return _in_order([self._run(None, run.start, run.stop, bypassed) for run in runs])

    def _regular(self, peers: int) -> Schedule:
        """Return one stage that trains the whole model together with so many like it."""
        if not peers:
            return Schedule(self.main, self.stages(0))
        whole = Blocks(tuple(range(len(self.parts.blocks))))
        return _in_order([self._staged(whole, [whole] * peers)])

    def _mixed(self, peers: int, start: int, stop: int) -> Schedule:
        """Return a stage that trains whole models, and blocks of one more beside them."""
        whole = Blocks(tuple(range(len(self.parts.blocks))))
        run = Blocks(tuple(range(start, stop)), tuple(range(start)), start == 0)
        return self._staged(whole, [*[whole] * peers, run])

    def _staged(self, blocks: Blocks, peers: Sequence[Blocks] = ()) -> Schedule:
        """Return one stage, on a piece that has all ways out.

        Which ones a device needs is known only when all its stages are; with fewer, they need less.
        """
        trainable = list(self._names("model", blocks))
        for number, other in enumerate(peers):
            trainable += self._names(f"{PEERS}{number}", other)
        name = " + ".join(part.name for part in (blocks, *peers))
        cut = {"blocks": plain(blocks), "peers": plain(list(peers))}
        exits = [n for n in range(1, len(self.shapes)) if self.has_exit(n)] if not peers else []
        piece = Piece(f"any blocks, {len(peers)} peers", {"exits": exits, "peers": len(peers)})
        return Schedule(piece, (Stage(1.0, 1, tuple(trainable), name, cut),))

    def has_exit(self, stop: int) -> bool:
        """Return whether there are weights between so many blocks and the logits or the head."""
        if stop == len(self.parts.blocks):
            return False
        if self.options.heads == "auxiliary":
            return True
        return self.options.link == "conv" and self.shapes[stop] != self.shapes[-1]

    @cached_property
    def _weights(self) -> list[str]:
        """The names of the model's parameters, each with a dot behind it."""
        return [f"{name}." for name, _ in self.pattern(self.main).named_parameters()]

    def _names(self, model: str, blocks: Blocks) -> Iterator[str]:
        """Yield the prefixes of the names of what learns; parts without weights have none."""
        paths = [self.parts.blocks[number] for number in blocks.learn]
        paths += self.parts.stem if blocks.stem else ()
        own = model == "model" and self.has_exit(blocks.stop)
        paths += self.parts.head if not own or self.options.heads == "skip" else ()
        for path in paths:
            if any(name.startswith(f"{path}.") for name in self._weights):
                yield f"{model}.{path}"
        if own:
            yield f"exits.{blocks.stop}"


def _in_order(schedules: Sequence[Schedule]) -> Schedule:
    """Return one schedule out of several, one after the other on a piece made for them."""
    stages = tuple(stage for schedule in schedules for stage in schedule.stages)
    used = {Blocks.read(stage.cut["blocks"]).stop for stage in stages}
    cut = schedules[0].piece.cut
    size = "blocks " + " | ".join(stage.name for stage in stages)
    return Schedule(Piece(size, {**cut, "exits": sorted(used & set(cut["exits"]))}), stages)
