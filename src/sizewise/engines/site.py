"""A site: one process's view of a run, where plans are carried out.

The in-process engine has one site, the pool has one in each worker. It holds the method and the
data, and turns a state and a plan into an update.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sizewise import evaluation, norms
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Shards
from sizewise.errors import DataError, SizewiseError, UpdateRefused
from sizewise.evaluation import Score
from sizewise.method import Method
from sizewise.plan import Plan, Refusal, Update
from sizewise.state import State
from sizewise.training import Shard
from sizewise.view import Tensors, cut


@dataclass(frozen=True)
class Site:
    """A method and its data."""

    method: Method
    dataset: Dataset
    partition: Shards

    @cached_property
    def transform(self) -> Callable[[Tensor, torch.Generator | None], Tensor]:
        """Augmentation and normalisation of training batches."""
        recipe = self.method.task.recipe
        return self.dataset.transform("none" if recipe.augment_once else recipe.augment)

    def train(self, state: State, plan: Plan, parcel: Tensors | None = None) -> Update | Refusal:
        """Do a device's work for one round, given the server's state.

        Args:
            state: The server's state; in a worker, without the server's own memory.
            plan: What to do.
            parcel: What the server sends beside the model; default: what the method takes from the
                state.
        """
        parcel = self.method.parcel(state, plan) if parcel is None else parcel
        received = {**cut(state.tensors, self.method.view(plan.piece)), **parcel}
        return self.work(plan, received, state.devices.get(plan.device, {}))

    def work(self, plan: Plan, tensors: Tensors, memory: Tensors) -> Update | Refusal:
        """Do a device's work for one round, given what it received and what it remembers."""
        shard = Shard(
            self.dataset.train_images,
            self.dataset.train_labels,
            self.partition.shard(plan.device),
            self.transform,
        )
        start = time.perf_counter()
        try:
            if len(shard) == 0:
                raise DataError("it holds no training data")
            update = self.method.train(plan, tensors, shard, memory)
            if update.steps == 0:
                raise DataError(
                    f"its {len(shard)} samples fill no batch; turn recipe.drop_last off"
                )
            if not math.isfinite(update.loss):
                raise UpdateRefused(
                    f"its training loss is {update.loss}; lower recipe.lr or set recipe.clip"
                )
        except SizewiseError as error:
            return Refusal(plan.device, plan.round, plan.group, str(error))
        except ValueError as error:
            # Batch norm refuses a single value per channel; any other ValueError is a bug.
            if len(shard) > 1:
                raise
            reason = f"it cannot train on a single sample: {error}"
            return Refusal(plan.device, plan.round, plan.group, reason)
        return replace(update, seconds=time.perf_counter() - start)

    def evaluate(self, state: State, size: str, batches: Iterable[int] | None) -> list[Score]:
        """Score one deployed model on some test batches, or on all of them."""
        recipe, data = self.method.task.recipe, self.dataset
        module = self.method.deploy(state)[size]()
        if recipe.norm == "sbn":
            # Batches of equal size, because each counts the same in the mean.
            count = evaluation.batch_count(len(data.train_labels), recipe.eval_batch)
            parts = torch.tensor_split(data.train_images, count)
            transform = data.transform()
            inputs = (transform(images, None) for images in parts)
            module = norms.recalibrate(copy.deepcopy(module), inputs)
        if recipe.eval_memory is not None:
            module = self.method.task.frugal(module)
        return evaluation.score(module, data, recipe.eval_batch, batches)
