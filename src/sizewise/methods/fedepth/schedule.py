"""FeDepth's schedules: what a device with so many bytes trains, in which order.

A device's bytes decide how its blocks are divided: into the longest runs, from the input on, that
can be trained with everything before them frozen. A device that holds the whole model trains it at
once, and with more room several of them, the last perhaps run by run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Submodel, TrainingStage
from sizewise.families.options import AssignedOptions
from sizewise.memory import accounting
from sizewise.memory.packing import Packing, pack_blocks
from sizewise.methods.fedepth.blocks import Blocks, BlockSubmodels, Run, TakenApart
from sizewise.surgery import norms

TOLERANCE = 0.05
"""By how much the paper's decompositions exceed its budgets, by its own accounting."""

MICRO = 8
"""Where it saves memory, a frozen prefix runs in this many parts of a batch."""


@dataclass(frozen=True)
class ScheduleOptions(AssignedOptions):
    """Options that say what a device trains. By ratio, it is the paper's accounting that decides.

    Attributes:
        heads: Whether runs of blocks share the head through a link, or have heads of their own.
        link: What leads a hidden tensor to the head.
        skip: What happens to images at a block that does not fit.
        models: Most models that a device whose bytes hold them trains together; a device of
            unlimited memory trains one.
        data: Whether batches are fresh in each epoch, fixed for a round, or buffered as well.
    """

    heads: Literal["skip", "auxiliary"] = "skip"
    link: Literal["pad", "conv"] = "pad"
    skip: Literal["pass", "bypass"] = "pass"
    models: int = 2
    data: Literal["fresh", "fixed", "buffered"] = "fresh"

    def __post_init__(self) -> None:
        if self.models < 1:
            raise ConfigError(f"method.models must be at least 1, not {self.models}")
        if self.link == "conv" and self.heads == "auxiliary":
            raise ConfigError(
                "method.link = 'conv' leads to the model's head, and with auxiliary heads runs "
                "of blocks do not use it; set method.heads to 'skip' or leave the link out"
            )


@dataclass(frozen=True)
class Schedule:
    """What a kind of device trains: its submodel, and stages in order."""

    submodel: TakenApart
    stages: tuple[TrainingStage, ...]


class Scheduler:
    """Finds schedules, and remembers them.

    `peak` says what a step of a stage needs in bytes, `least` the same with all levers pulled.
    """

    def __init__(
        self,
        submodels: BlockSubmodels,
        options: ScheduleOptions,
        peak: Callable[[Submodel, TrainingStage], int],
        least: Callable[[Submodel, TrainingStage], int],
    ) -> None:
        self.task, self.submodels = submodels.task, submodels
        self.options, self._peak_of, self._least_of = options, peak, least
        self._known: dict[float | None, Schedule] = {}

    def schedule(self, capacity: float | None) -> Schedule:
        """Return what a device with so many bytes, or such a ratio, trains, in which order."""
        if capacity not in self._known:
            if capacity is None:
                schedule = self.regular(0)
            elif self.options.assign == "ratio":
                schedule = self._published(capacity)
            elif self.peak(self.regular(0)) <= capacity:
                schedule = self._together(int(capacity))
            elif self.least(self.regular(0)) <= capacity:
                schedule = self.regular(0)
            else:
                schedule = self._runs(int(capacity))
            self._known[capacity] = schedule
        return self._known[capacity]

    def peak(self, schedule: Schedule) -> int:
        """Return the bytes of the costliest step of a schedule."""
        return max(self._peak_of(schedule.submodel, stage) for stage in schedule.stages)

    def least(self, schedule: Schedule) -> int:
        """Return the fewest bytes that a schedule can be trained in."""
        return max(self._least_of(schedule.submodel, stage) for stage in schedule.stages)

    def _runs(self, memory: int) -> Schedule:
        """Return the decomposition for a device that cannot hold the whole model."""
        skipped = self._bypassed(memory)

        def stage(start: int, stop: int) -> Schedule:
            return self.run(memory, start, stop, skipped)

        packing = self._pack(memory, stage, self.least)
        runs = [stage(run.start, run.stop) for run in packing.stages]
        last = len(self.submodels.parts.blocks) - 1
        if last in packing.skipped:
            runs = self._beside(stage(last, last + 1), runs, memory)
        return in_order(runs)

    def _beside(self, last: Schedule, runs: list[Schedule], memory: int) -> list[Schedule]:
        """Return the runs that leave room for the last block, and it; without any room, all runs.

        Only the last block's head is deployed. The heads of other runs lie idle meanwhile, and must
        not be why nobody trains it.
        """
        kept: list[Schedule] = []
        for run in (last, *reversed(runs)):
            if self.least(in_order([run, *kept])) <= memory:
                kept.insert(0, run)
            elif run is last:
                return runs
        return kept

    def _bypassed(self, memory: int) -> tuple[int, ...]:
        """Return the blocks that do not fit alone and are not even run."""
        found: tuple[int, ...] = ()
        if self.options.skip == "bypass":
            for number in range(len(self.submodels.parts.blocks)):
                if self.least(self.run(memory, number, number + 1, found)) > memory:
                    found += (number,)
        return found

    def run(self, memory: int | None, start: int, stop: int, bypassed: Sequence[int]) -> Schedule:
        """Return the stage that trains blocks start, ..., stop - 1."""
        frozen = tuple(number for number in range(start) if number not in bypassed)
        # The gradient of the stem would need the activations of the blocks after it.
        stem = not frozen
        # A forward that stays in charge starts from images: frozen blocks run again.
        in_turn = not self.submodels.in_place
        buffered = self.options.data == "buffered" and not stem and in_turn
        blocks = Blocks(tuple(range(start, stop)), frozen, stem, buffered)
        stage = self._staged(Run(blocks))
        if memory is None or stem or buffered or not in_turn or not self._separable:
            return stage
        if self.peak(stage) <= memory:
            return stage
        micro = max(1, self.task.recipe.batch // MICRO)
        return self._staged(Run(replace(blocks, micro=micro)))

    @cached_property
    def _separable(self) -> bool:
        """Whether a sample's hidden tensors do not depend on the batch it is in."""
        return not norms.uses_batch_statistics(self.submodels.pattern(TakenApart()))

    def _pack(
        self,
        memory: int,
        stage: Callable[[int, int], Schedule],
        cost: Callable[[Schedule], int],
    ) -> Packing:
        count = len(self.submodels.parts.blocks)
        return pack_blocks(lambda i, j: cost(stage(i, j)), count, memory)

    def _together(self, memory: int) -> Schedule:
        """Return the schedule of a device that holds the whole model, perhaps several."""
        count = 0
        while count + 1 < self.options.models and self.peak(self.regular(count + 1)) <= memory:
            count += 1
        if count + 1 == self.options.models:
            return self.regular(count)
        # What is left may hold one more, trained run by run beside the others. Together they need
        # no more than the sum of what each needs alone, give or take a few logits.
        left = memory - self.peak(self.regular(count))
        try:
            packing = self._pack(left, lambda i, j: self.run(left, i, j, ()), self.peak)
        except BudgetTooSmall:
            return self.regular(count)
        mixed = in_order([self.mixed(count, run.start, run.stop) for run in packing.stages])
        if packing.skipped or self.peak(mixed) > memory:
            return self.regular(count)
        return mixed

    def _published(self, ratio: float) -> Schedule:
        """Return the decomposition that the paper's accounting gives for a ratio."""
        inputs = self.task.inputs(self.task.recipe.batch)
        counted = accounting.summary(self.task.build(), inputs, self.submodels.parts)
        whole = int(ratio + 1e-9)
        if ratio - whole < 1e-9 or whole >= self.options.models:
            return self.regular(min(whole, self.options.models) - 1)
        packing = pack_blocks(
            counted.stage, len(counted.blocks), (ratio - whole) * counted.total, TOLERANCE
        )
        runs = packing.stages
        if whole and packing.skipped:
            return self.regular(whole - 1)
        if whole:
            return in_order([self.mixed(whole - 1, run.start, run.stop) for run in runs])
        bypassed = packing.skipped if self.options.skip == "bypass" else ()
        return in_order([self.run(None, run.start, run.stop, bypassed) for run in runs])

    def regular(self, peers: int) -> Schedule:
        """Return one stage that trains the whole model together with so many like it."""
        if not peers:
            return Schedule(TakenApart(), (replace(self.task.stage(), work=Run()),))
        return in_order([self._staged(Run(self._whole, (self._whole,) * peers))])

    def mixed(self, peers: int, start: int, stop: int) -> Schedule:
        """Return a stage that trains whole models, and blocks of one more beside them."""
        blocks = Blocks(tuple(range(start, stop)), tuple(range(start)), start == 0)
        return self._staged(Run(self._whole, (*[self._whole] * peers, blocks)))

    @property
    def _whole(self) -> Blocks:
        return Blocks(tuple(range(len(self.submodels.parts.blocks))))

    def _staged(self, run: Run) -> Schedule:
        """Return one stage, on a submodel that has all ways out.

        Which ones a device needs is known only when all its stages are; with fewer, they need less.
        """
        stops = range(1, len(self.task.hidden_shapes)) if not run.peers else ()
        exits = tuple(stop for stop in stops if self.submodels.has_exit(stop))
        held = TakenApart(True, exits, len(run.peers), f"any blocks, {len(run.peers)} peers")
        return Schedule(held, (TrainingStage(1.0, 1, self.submodels.learning(run), run),))


def in_order(schedules: Sequence[Schedule]) -> Schedule:
    """Return one schedule out of several, one after the other on a submodel made for them."""
    stages = tuple(stage for schedule in schedules for stage in schedule.stages)
    runs = [stage.work for stage in stages]
    used = {run.blocks.stop for run in runs if isinstance(run, Run) and run.blocks}
    held = schedules[0].submodel
    label = "blocks " + " | ".join(run.label for run in runs)
    exits = tuple(sorted(used & set(held.exits)))
    return Schedule(replace(held, exits=exits, label=label), stages)
