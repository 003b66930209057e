"""The device's part of a method: a plan's stages, trained one after the other and metered."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sizewise.common import rng
from sizewise.exchange.plan import Plan, TrainingStage, Update
from sizewise.exchange.view import Tensors
from sizewise.families.submodels import Submodels
from sizewise.memory.meter import Meter
from sizewise.steps.optimizers import MOMENTS
from sizewise.steps.step import Loss
from sizewise.training import loop
from sizewise.training.loop import Samples, Shard
from sizewise.training.task import Task

Data = Callable[[torch.Generator, Meter | None], Iterator[Samples]]
"""Yields what each stage trains on; each is asked for when the stages before it are done."""


class Trainer:
    """Trains devices in this process, and remembers the peaks that it metered.

    Peaks depend on shapes only: the first device of each kind of work is metered, and its figure
    serves the others, unless steps differ.

    Args:
        task: What is trained, and how.
        submodels: The models.
        constant: Whether all steps of a stage need the same bytes.
    """

    def __init__(self, task: Task, submodels: Submodels, constant: bool) -> None:
        self.task, self.submodels, self._constant = task, submodels, constant
        self._metered: dict[tuple[object, ...], int] = {}

    def fit(
        self,
        plan: Plan,
        tensors: Tensors,
        shard: Shard,
        loss: Callable[[TrainingStage], Loss],
        *,
        data: Data | None = None,
        anchor: Tensors | None = None,
        moments: Tensors | None = None,
        kind: tuple[object, ...] = (),
    ) -> Update:
        """Train a plan's stages, from these tensors; return what they trained as an update.

        Args:
            plan: What to do.
            tensors: What the model starts from, by local name.
            shard: The device's data.
            loss: What a stage minimises.
            data: What the stages train on; default: the shard, each of them.
            anchor: Where a proximal term pulls, by local name; default: where the model starts.
            moments: What optimisers remember from earlier, to be changed. One then lasts over all
                stages, and what it remembers in the end is in the update's device state. Default: a
                fresh one for each stage.
            kind: What the bytes depend on besides the submodel, its stages and the batch.
        """
        copy = self.submodels.copy(plan.submodel)
        module, stages = copy.load(tensors), [copy.actual(stage) for stage in plan.stages]
        recipe, seed = self.task.recipe, self.task.seed
        generator = rng.torch_generator(seed, "batches", plan.round, plan.device)
        # A meter that finds its budget crossed ends the device's work.
        known = self.known_peak(plan, shard, kind)
        meter = Meter(self._held_to(plan)) if known is None else None
        with rng.seeded(seed, "dropout", plan.round, plan.device):
            train = partial(
                loop.fit,
                received=tensors if anchor is None else anchor,
                meter=meter,
                every_step=self.task.enforce or not self._constant,
            )
            samples = data(generator, meter) if data else iter([shard] * len(stages))
            steps, losses = 0, 0.0
            # Not in a loop over the data, which would hold a stage's beside that of the next one.
            for stage in stages:
                moments = loop.going_on(moments, stage)
                done = train(
                    module,
                    stage,
                    next(samples),
                    recipe,
                    generator,
                    loss(stage),
                    parameters=copy.ready(stage),
                    moments=moments,
                )
                steps, losses, moments = steps + done.steps, losses + done.loss_sum, done.moments
                del done  # Else all its moments would stay alive beside the next stage.
        key = self._key(plan, shard, kind)
        if meter is not None:
            earlier = self._metered.get(key, 0) if self._constant else 0
            self._metered[key] = max(meter.peak, earlier)
        return Update(
            plan=plan,
            tensors=copy.trained(stages),
            samples=len(shard),
            steps=steps,
            # The mean loss tells of samples, and no noise hides it: then it stays on the device.
            loss=losses / max(steps, 1) if recipe.sample_clip is None else 0.0,
            peak_bytes=self._metered[key],
            device_state={f"{MOMENTS}{name}": t.cpu() for name, t in (moments or {}).items()},
        )

    def known_peak(self, plan: Plan, shard: Shard, kind: tuple[object, ...] = ()) -> int | None:
        """Return the metered peak of a device's work; None if it must be metered."""
        known = self._metered.get(self._key(plan, shard, kind)) if self._constant else None
        if known is None or self.task.enforce:
            return None
        budget = self._held_to(plan)
        return known if budget is None or known <= budget else None

    def _held_to(self, plan: Plan) -> int | None:
        """Return the bytes that a meter holds a device to.

        Budgets are of the device that is simulated. An accelerator's kernels may need other bytes,
        for which nobody is refused unless every step is to be held to its budget.
        """
        return plan.budget if self.task.device == "cpu" or self.task.enforce else None

    def _key(self, plan: Plan, shard: Shard, kind: tuple[object, ...]) -> tuple[object, ...]:
        """Return a key that devices share whose work needs the same bytes."""
        works = tuple((s.trainable, s.work, s.levers) for s in plan.stages)
        return (plan.submodel.shape_key, works, min(len(shard), 2 * self.task.recipe.batch), kind)
