"""From a config to what it stands for, before anything is written or trained.

The data is loaded and divided, the model is built, the fleet is made, and what will be cut is
checked: everything that can be wrong with a config shows here.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from sizewise import models
from sizewise.common import rng
from sizewise.common.threads import one_thread
from sizewise.config import Config, make_method, make_task
from sizewise.cutting.verification import verify
from sizewise.data import memory, partitions, sources
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Draw, Shards
from sizewise.errors import BudgetTooSmall, CheckpointError, ConfigError
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.families.widthwise import Widthwise
from sizewise.fleet.attackers import drawn, flipped
from sizewise.fleet.devices import Fleet
from sizewise.fleet.making import make_fleet
from sizewise.memory import accounting
from sizewise.models.memory import identity
from sizewise.runs.cuts import Cuts
from sizewise.training.task import Task


@dataclass(frozen=True)
class Setting:
    """What a config stands for, before anything is written or trained."""

    config: Config
    dataset: Dataset
    method: Method
    fleet: Fleet
    partition: Shards

    @cached_property
    def start(self) -> State:
        """The state of the first round: made once, for what is checked and for the run."""
        return self.method.setup()

    def begin(self) -> State:
        """Return the state of the first round, and let go of it: it is as large as the model."""
        start = self.start
        del vars(self)["start"]
        return start


# What initialisation computes depends on the number of threads.


@one_thread()
def prepare(config: Config, dataset: Dataset | None = None, *, sketched: bool = False) -> Setting:
    """Load the data, build the model, deal out the samples; raise if anything does not fit.

    A dataset that is in memory already takes the place of what the config names. A sketched setting
    is quick to make and to plan with, and cannot be trained; see `Task`.
    """
    models.factory(config.model.name)  # A wrong name shows before the data is read.
    dataset = loaded(config) if dataset is None else dataset
    config = identified(config, dataset)
    data = config.data
    dataset.transform(config.recipe.augment)  # Raises now if it has no such augmentation.
    task = make_task(config, dataset, sketched=sketched)
    if config.recipe.sample_clip is not None:
        make_method(config, task)  # Ratios become bytes of steps; it says if there can be none.
    fleet = make_fleet(config.fleet, partial(bytes_of_ratio, task), partial(bytes_of_share, task))
    method = make_method(config, make_task(config, dataset, fleet, sketched=sketched))
    method.task.arrangement  # noqa: B018  (raises now if the model cannot be laid out so)
    if config.recipe.eval_memory is not None:
        try:
            task.low_memory_inference(method.submodels.pattern(method.main))
        except BudgetTooSmall as error:
            raise ConfigError(
                f"recipe.eval_memory is {error.budget:,} bytes, and evaluation needs at least "
                f"{error.needed:,}; raise it, or lower recipe.eval_batch"
            ) from None
    partition = partitions.make(
        data.partition,
        *dataset.strata,
        fleet.total,
        config.seed,
        groups=dataset.groups,
        **data.options(),
    )
    dataset = _attacked(config, dataset, fleet, partition)
    if config.recipe.augment_once:
        dataset = _augmented(config, dataset, partition.held_out())
    return Setting(config, dataset, method, fleet, partition)


def _attacked(config: Config, dataset: Dataset, fleet: Fleet, partition: Shards) -> Dataset:
    """Return data in which attackers that flip labels have done so; raise if they cannot attack."""
    attackers = drawn(config.fleet.attack, fleet, config.seed)
    if attackers.attacks and config.recipe.upload != "full":
        raise ConfigError(
            f"fleet.attack changes whole updates, and recipe.upload is {config.recipe.upload!r}; "
            f"leave one of them out"
        )
    if not (liars := attackers.of_kind("label-flip")):
        return dataset
    if dataset.target != "class" or dataset.silos or isinstance(partition, Draw):
        raise ConfigError(
            "fleet.attack.kind = 'label-flip' needs samples with one class each, of one set of "
            "classes, which no two devices share; use another kind, data or data.partition"
        )
    rows = torch.cat([partition.shard(device) for device in liars])
    labels = flipped(dataset.train_labels, rows, dataset.classes)
    return replace(dataset, train_labels=labels)


def _augmented(config: Config, dataset: Dataset, held_out: Tensor) -> Dataset:
    """Return data whose training images are augmented once, but for those to validate on."""
    generator = rng.torch_generator(config.seed, "augment-once")
    changed = dataset.augmented(config.recipe.augment, generator)
    if not len(held_out):
        return changed
    originals = dataset.train_inputs[held_out]
    return replace(changed, train_inputs=changed.train_inputs.index_copy(0, held_out, originals))


def loaded(config: Config) -> Dataset:
    """Return the data that a config names."""
    data = config.data
    memory.check(data, None)
    dataset = sources.configured(data, config.model.weights)
    memory.check(data, dataset)  # Somebody may have edited the name, not the hash.
    return dataset


@one_thread()
def identified(config: Config, dataset: Dataset) -> Config:
    """Return the config with the hash of its model, if that was given from Python.

    Raises:
        CheckpointError: It has a hash, and that is of another model.
    """
    if config.model.sha256 is None and not models.is_at_hand(config.model.name):
        return config
    found = check_model(make_task(config, dataset))
    return replace(config, model=replace(config.model, sha256=found))


def check_model(task: Task) -> str:
    """Return the hash of a task's model; raise CheckpointError if the task has another one."""
    found = identity(task.build(), task.drawn(2))
    if task.model.sha256 not in (None, found):
        raise CheckpointError(
            f"the model is not what this run was started with ({task.model.name!r}, by its "
            "model.sha256): its layers, shapes or calls differ; give that one, or if only the "
            "version of torch is another, delete that hash"
        )
    return found


def checked(method: Method) -> Cuts | None:
    """Check what a method cuts out of the model, and return what to say; None if it cuts nothing.

    Raises:
        ModelError: A submodel does not compute what the model with its other channels masked does.
    """
    trained = method.trained()
    traced = method.submodels.traced(trained)
    if traced is None:
        return None
    cut = [kept for kept in map(method.submodels.kept, trained) if kept is not None]
    # The smallest, and one from the middle: what cannot be cut shows in any of them.
    for kept in (*cut[:1], *(cut[len(cut) // 2 :][:1] if len(cut) > 1 else ())):
        verify(method.task.build(), traced, kept)
    return Cuts(traced.cut_share, traced.notes)


def bytes_of_ratio(task: Task, ratio: float) -> int:
    """Return the bytes that stand for a share of the model; the same for all methods of a recipe.

    Up to 1 it is what a plain training step of the model at that width costs, its channels rounded
    up; above 1, that many times what the whole model costs.
    """
    plain = Widthwise(task)
    return round(max(1.0, ratio) * plain.peak(plain.narrow(min(ratio, 1.0))))


def bytes_of_share(task: Task, share: float) -> int:
    """Return the bytes that stand for a share of the model in FeDepth's scenarios.

    They are a share of what the paper counts for the whole model: 20.3 MB are a sixth of
    PreResNet-20 at batch 32 on CIFAR-10. What is alive at any time is less than half of that.
    """
    model = task.build_to_run()
    inputs = task.inputs(task.recipe.batch)
    return round(share * accounting.summary(model, inputs, task.anatomy(model)).total)
