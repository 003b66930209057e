"""A session: from a config to a federation that is ready to run, and cleaned up afterwards.

Everything that can be wrong with a config shows before the run folder is made: the data is loaded
and divided, the model is built and checked, and some device is known to be able to take part.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from sizewise import accounting, checkpoint, models, preview, resuming, rng
from sizewise.config import Config, make_method, make_task
from sizewise.cuts import FILE, Cuts
from sizewise.data import memory, partitions, sources
from sizewise.data.catalog import own_name
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Shards
from sizewise.data.texts import own_tokenizer
from sizewise.engines import Engine, RemoteEngine
from sizewise.engines.local import LocalEngine
from sizewise.engines.pool import PoolEngine
from sizewise.engines.site import Site
from sizewise.environment import drift, environment
from sizewise.errors import BudgetTooSmall, CheckpointError, ConfigError
from sizewise.federation import Federation, check_fleet
from sizewise.fleet import Fleet, make_fleet
from sizewise.masking import verify
from sizewise.method import Method
from sizewise.run import RunFolder
from sizewise.state import State
from sizewise.structure import plain
from sizewise.task import Task
from sizewise.threads import one_thread
from sizewise.widthwise import Widthwise

log = logging.getLogger(__name__)


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
def prepare(config: Config, dataset: Dataset | None = None) -> Setting:
    """Load the data, build the model, deal out the samples; raise if anything does not fit.

    Args:
        config: The run.
        dataset: Data that is in memory already, in place of what the config names.
    """
    models.factory(config.model.name)  # A wrong name shows before the data is read.
    data = config.data
    dataset = _loaded(config) if dataset is None else dataset
    dataset.transform(config.recipe.augment)  # Raises now if it has no such augmentation.
    if config.recipe.augment_once:
        generator = rng.torch_generator(config.seed, "augment-once")
        dataset = dataset.augmented(config.recipe.augment, generator)
    task = make_task(config, dataset)
    fleet = make_fleet(config.fleet, partial(bytes_of_ratio, task), partial(bytes_of_share, task))
    method = make_method(config, make_task(config, dataset, fleet))
    if config.recipe.eval_memory is not None:
        try:
            task.frugal(method.pattern(method.main))
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
    return Setting(config, dataset, method, fleet, partition)


def _loaded(config: Config) -> Dataset:
    """Return the data that a config names."""
    data = config.data
    memory.check(data, None)
    dataset = sources.load(
        data.name,
        data.root,
        train_limit=data.train_limit,
        test_limit=data.test_limit,
        image_size=data.image_size,
        tokenizer=data.tokenizer or own_tokenizer(config.model.weights),
        max_tokens=data.max_tokens,
        metric=data.metric,
        silos=data.silos,
    )
    memory.check(data, dataset)  # Somebody may have edited the name, not the hash.
    return dataset


def checked(method: Method) -> Cuts | None:
    """Check what a method cuts out of the model, and return what to say; None if it cuts nothing.

    Raises:
        ModelError: A piece does not compute what the model with its other channels masked does.
    """
    seen = set()
    for piece in method.cuts():
        kept = method.kept(piece)
        if kept is None or method.traced is None:
            continue
        sizes = tuple(map(len, kept.values()))
        if sizes not in seen:
            verify(method.task.build(), method.traced, kept)
        seen.add(sizes)
    traced = method.traced
    return None if traced is None else Cuts(traced.cut_share, traced.notes)


def bytes_of_ratio(task: Task, ratio: float) -> int:
    """Return the bytes that stand for a share of the model; the same for all methods of a recipe.

    Up to 1 it is what a plain training step of the model at that width costs, its channels rounded
    up; above 1, that many times what the whole model costs.
    """
    plain = Widthwise(task)
    (stage,) = plain.stages(0)
    return round(max(1.0, ratio) * plain.footprint(plain.piece(min(ratio, 1.0)), stage).peak)


def bytes_of_share(task: Task, share: float) -> int:
    """Return the bytes that stand for a share of the model in FeDepth's scenarios.

    They are a share of what the paper counts for the whole model: 20.3 MB are a sixth of
    PreResNet-20 at batch 32 on CIFAR-10. What is alive at any time is less than half of that.
    """
    model = task.build()
    inputs = task.inputs(task.recipe.batch)
    return round(share * accounting.summary(model, inputs, task.anatomy(model)).total)


@contextmanager
def started(
    config: Config,
    out: Path | None = None,
    dataset: Dataset | None = None,
    engine: RemoteEngine | None = None,
) -> Iterator[Federation]:
    """Yield the federation of a new run.

    Args:
        config: The run.
        out: Its folder; default: a new one under `runs/`.
        dataset: Data that is in memory already, in place of what the config names.
        engine: Where devices do their work, in place of this machine. Its owner closes it.
    """
    if dataset is not None:
        config = replace(config, data=memory.recorded(config.data, dataset))
    with one_thread(), nullcontext(engine) if engine else _engine(config) as remote:
        setting = prepare(config, dataset)
        check_fleet(setting.method, setting.fleet, setting.start)
        cuts = checked(setting.method)
        folder = RunFolder.create(out or new_name(config), config)
        try:
            yield _federation(setting, folder, remote, cuts)
        finally:
            folder.release()


@contextmanager
def resumed(
    path: Path,
    dataset: Dataset | None = None,
    engine: RemoteEngine | None = None,
    overrides: Sequence[str] = (),
) -> Iterator[Federation]:
    """Yield the federation of an earlier run, to go on where it stopped.

    Args:
        path: Its folder.
        dataset: The data it was started with, if that was given in memory.
        engine: Where devices do their work, in place of this machine. Its owner closes it.
        overrides: Values of its config to change on the way, such as `rounds=40`.
    """
    # Before anything is written: opening the folder records what changes.
    memory.check(resuming.read(path, overrides).data, dataset)
    folder, config = RunFolder.open(path, overrides)
    try:
        with one_thread(), nullcontext(engine) if engine else _engine(config) as remote:
            setting = prepare(config, dataset)
            yield _federation(setting, folder, remote, checked(setting.method))
    finally:
        folder.release()


@contextmanager
def _engine(config: Config) -> Iterator[PoolEngine | None]:
    """Start the worker processes first: they import while this process loads the data."""
    others = [group.model for group in config.fleet.group if group.model is not None]
    for name in (config.model.name, config.method.name, *others):
        if name.startswith("__main__:") and config.engine.workers > 1:
            raise ConfigError(
                f"worker processes cannot import {name!r}; move it into a file of its own, "
                f"or set engine.workers to 1"
            )
    pool = PoolEngine(config.engine.workers) if config.engine.workers > 1 else None
    try:
        yield pool
    finally:
        if pool is not None:
            pool.close()


def _federation(
    setting: Setting, folder: RunFolder, remote: RemoteEngine | None, cuts: Cuts | None
) -> Federation:
    config, method, dataset = setting.config, setting.method, setting.dataset
    identity = {"data_sha256": dataset.fingerprint()}
    described = folder.path / "partition.json"
    if not folder.partition.exists():
        facts: dict[str, object] = {
            "plan.json": preview.rows_of(setting, wishes=False),
            "environment.json": environment(),
        }
        if cuts is not None:
            facts[FILE] = plain(cuts)
        for name, content in facts.items():
            checkpoint.write_bytes(folder.path / name, json.dumps(content, indent=1).encode())
        counts = partitions.summary(setting.partition, *dataset.strata)
        checkpoint.write_bytes(described, json.dumps({**identity, **counts}).encode())
        draft = folder.path / ".partition.tmp"
        partitions.save(setting.partition, draft)
        draft.rename(folder.partition)
    elif json.loads(described.read_text())["data_sha256"] != identity["data_sha256"]:
        raise CheckpointError(
            f"the data is not what {str(folder.path)!r} was started with; "
            f"restore {config.data.name!r}, or start a new run"
        )
    elif said := drift(json.loads((folder.path / "environment.json").read_text())):
        log.warning("%s", said)
    engine: Engine
    if remote is None:
        engine = LocalEngine(Site(method, dataset, setting.partition, config.engine.together))
    else:
        remote.open(config, method, dataset, str(folder.partition))
        engine = remote
    folder.restore()  # A damaged checkpoint should show now, before anything is announced.
    return Federation(config, method, setting.fleet, engine, folder, setting.begin)


def new_name(config: Config) -> Path:
    """Return a folder under `runs/` that does not exist yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    data = Path(own_name(config.data.name)).name
    name = f"{stamp}-{config.method.name.rpartition(':')[2]}-{data}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path
