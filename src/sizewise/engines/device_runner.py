"""A device runner: one process's view of a run, where plans are carried out.

The in-process engine has one, the pool has one in each worker. It holds the method and the
data, and turns a state and a plan into an update.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Shards
from sizewise.errors import DataError, SizewiseError
from sizewise.exchange import compression
from sizewise.exchange.plan import Plan, Refusal, Submodel, Update, read_plan
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, cut
from sizewise.families.base import Method
from sizewise.surgery import norms
from sizewise.training import evaluation
from sizewise.training.evaluation import Score
from sizewise.training.loop import Shard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceRunner:
    """A method, its data, and who has which samples.

    At most `together` devices train in one batched call; 0: each alone.
    """

    method: Method
    dataset: Dataset
    partition: Shards
    together: int = 0

    @cached_property
    def _apart(self) -> set[Submodel]:
        """Submodels that turned out not to be trainable several at once: a cache."""
        return set()

    @cached_property
    def transform(self) -> Callable[[Tensor, torch.Generator | None], Tensor]:
        """Augmentation and normalisation of training batches."""
        recipe = self.method.task.recipe
        return self.dataset.transform("none" if recipe.augment_once else recipe.augment)

    def read_plan(self, values: Mapping[str, Any]) -> Plan:
        """Return the plan that came as plain values."""
        return read_plan(values, self.method.submodel_type, self.method.work_type)

    def train(self, state: State, plan: Plan, payload: Tensors | None = None) -> Update | Refusal:
        """Do a device's work for one round, given the server's state and what it sends beside it.

        A worker's state lacks the server's own memory; by default the method takes the payload from
        the state.
        """
        payload = self.method.payload(state, plan) if payload is None else payload
        received = {**cut(state.tensors, self.method.submodels.view(plan.submodel)), **payload}
        return self.work(plan, received, state.devices.get(plan.device, {}))

    def train_all(
        self, state: State, plans: Sequence[Plan], payloads: Sequence[Tensors | None]
    ) -> Iterator[Update | Refusal]:
        """Do the work of devices whose plans are alike; yield it in order."""
        at_once = self._at_once(state, plans) if self.together else None
        if at_once is not None:
            yield from at_once
            return
        for plan, payload in zip(plans, payloads, strict=True):
            yield self.train(state, plan, payload)

    def _at_once(self, state: State, plans: Sequence[Plan]) -> list[Update | Refusal] | None:
        """Do the work of devices in one batched call; None if that cannot be done."""
        from sizewise.engines import together  # Not needed, and slow to import, for most runs.

        submodel = plans[0].submodel
        if len(plans) < 2 or submodel in self._apart or self.method.task.recipe.upload != "full":
            return None
        shards = [self._shard(plan.device) for plan in plans]
        if not together.possible(self.method, plans[0], shards):
            return None
        start = time.perf_counter()
        tensors = cut(state.tensors, self.method.submodels.view(plans[0].submodel))
        try:
            updates = together.fit(self.method, plans, tensors, shards)
        except (RuntimeError, ValueError) as error:
            log.info("devices with model %s train one by one: %s", submodel.label, error)
            self._apart.add(submodel)
            return None
        seconds = (time.perf_counter() - start) / len(plans)
        return [_judged(replace(update, seconds=seconds)) for update in updates]

    def _shard(self, device: int) -> Shard:
        return Shard(
            self.dataset.train_inputs,
            self.dataset.train_labels,
            self.partition.shard(device),
            self.transform,
        )

    def work(self, plan: Plan, tensors: Tensors, device_state: Tensors) -> Update | Refusal:
        """Do a device's work for one round, given what it received and what it remembers."""
        shard, recipe = self._shard(plan.device), self.method.task.recipe
        self.method.submodels.release(plan.submodel)
        start = time.perf_counter()
        received = compression.kept(tensors, recipe)
        try:
            if len(shard) == 0:
                raise DataError("it holds no training data")
            own = compression.own_state(device_state)
            update = self.method.train(plan, tensors, shard, own)
        except SizewiseError as error:
            return refusal(plan, str(error))
        except ValueError as error:
            # Batch norm refuses a single value per channel; any other ValueError is a bug.
            if len(shard) > 1:
                raise
            return refusal(plan, f"it cannot train on a single sample: {error}")
        outcome = _judged(replace(update, seconds=time.perf_counter() - start))
        if isinstance(outcome, Refusal):
            return outcome
        return compression.encoded(outcome, received, device_state, recipe)

    def rest(self) -> None:
        """Give back what this process holds of an accelerator, so that others can use it."""
        self.method.submodels.release()
        if self.method.task.device != "cpu":
            torch.accelerator.empty_cache()

    def free_memory(self) -> int:
        """Return the bytes that the accelerator of this process has left."""
        device = self.method.task.device
        torch.zeros((), device=device)  # From now on, this process takes its share for being there.
        return int(torch.accelerator.get_memory_info(device)[0])

    def evaluate(
        self,
        state: State,
        size: str,
        batches: Iterable[int] | None = None,
        rows: Tensor | None = None,
    ) -> list[Score]:
        """Score one deployed model on some batches, or on all; of the test set, or of some rows."""
        recipe, data = self.method.task.recipe, self.dataset
        module = self.method.deploy(state)[size].fill()
        if recipe.norm == "sbn":
            inputs = training_batches(data, recipe.eval_batch, self.partition.held_out())
            module = norms.recalibrate(copy.deepcopy(module), inputs)
        if recipe.eval_memory is not None:
            module = self.method.task.low_memory_inference(module)
        return evaluation.score(module, data, recipe.eval_batch, batches, rows)


def training_batches(data: Dataset, batch: int, held_out: Tensor) -> Iterator[Tensor]:
    """Yield the training data once, in batches of equal size, because each counts the same.

    The rows that are held out for validation are not among them.
    """
    transform, samples = data.transform(), len(data.train_labels)
    trained = torch.ones(samples, dtype=torch.bool).index_fill(0, held_out, False).nonzero()[:, 0]
    for rows in torch.tensor_split(trained, evaluation.batch_count(len(trained), batch)):
        yield transform(data.train_inputs[rows], None)


def refusal(plan: Plan, reason: str) -> Refusal:
    """Return why the device of a plan does not take part."""
    return Refusal(plan.device, plan.round, plan.group, reason)


def _judged(update: Update) -> Update | Refusal:
    """Return an update, or why it is of no use."""
    if update.steps == 0:
        reason = f"its {update.samples} samples fill no batch; turn recipe.drop_last off"
    elif not math.isfinite(update.loss):
        reason = f"its training loss is {update.loss}; lower recipe.lr or set recipe.clip"
    else:
        return update
    return refusal(update.plan, reason)
