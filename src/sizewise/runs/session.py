"""A session: from a config to a federation that is ready to run, and cleaned up afterwards.

The run folder is made when nothing can be wrong with the config any more (`preparation`), and some
device is known to be able to take part.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from sizewise import models
from sizewise.common.environment import drift, environment
from sizewise.common.structure import plain
from sizewise.common.threads import one_thread
from sizewise.config import Config
from sizewise.data import memory, partitions
from sizewise.data.catalog import MEMORY, own_name
from sizewise.data.dataset import Dataset
from sizewise.engines import Engine, RemoteEngine
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.engines.pool import PoolEngine
from sizewise.errors import CheckpointError, ConfigError
from sizewise.exchange import checkpoint
from sizewise.fleet.attacks import refuse_attackers
from sizewise.models.memory import Built
from sizewise.runs import merge_outlook, preview, private_rounds, provenance, resuming
from sizewise.runs.benefit import Validation
from sizewise.runs.cuts import FILE, Cuts
from sizewise.runs.federation import Federation, check_fleet
from sizewise.runs.folder import RunFolder
from sizewise.runs.preparation import Setting, checked, prepare
from sizewise.runs.private_rounds import PrivateRounds
from sizewise.runs.untrained import untrained
from sizewise.torch_tools import placement

log = logging.getLogger(__name__)


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
    if config.model.hollow:
        raise ConfigError(
            "model.hollow builds a model without weights, which can be planned for, not trained; "
            "leave it out"
        )
    _check_validation(config, engine)
    if engine is not None:
        refuse_attackers(config.fleet.attack)
    if engine is None:  # What "auto" is here is part of the run; other machines choose their own.
        device = placement.settled(config.engine.device)
        config = replace(config, engine=replace(config.engine, device=device))
    with one_thread(), nullcontext(engine) if engine else _engine(config) as remote:
        setting = _settled(config, dataset)
        check_fleet(setting.method, setting.fleet, setting.start)
        cuts = checked(setting.method)
        merge_outlook.check(merge := merge_outlook.outlook(setting))
        if merge is not None and merge.thin:
            log.warning("%s", merge)
        if (left := untrained(setting)) is not None:
            log.warning("%s", left)
        folder = RunFolder.create(out or new_name(config), setting.config)
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

    It needs the dataset it was started with, if that was given in memory; the engine is as for
    `started`. Overrides are values of its config to change on the way, such as `rounds=40`.
    """
    # Before anything is written: opening the folder records what changes.
    wanted = resuming.read(path, overrides)
    memory.check(wanted.data, dataset)
    provenance.check_tokenizer(path, wanted)
    _check_validation(wanted, engine)
    if engine is not None:
        refuse_attackers(wanted.fleet.attack)
    if wanted.privacy is not None and overrides:
        _settled(wanted, dataset)  # More rounds may spend more than was allowed.
    folder, config = RunFolder.open(path, overrides)
    try:
        with one_thread(), nullcontext(engine) if engine else _engine(config) as remote:
            setting = _settled(config, dataset)
            _check_weights(setting, folder)
            yield _federation(setting, folder, remote, checked(setting.method))
    finally:
        folder.release()


def _settled(config: Config, dataset: Dataset | None) -> Setting:
    """Return the setting of a run, with the noise that its privacy asks for."""
    setting = prepare(config, dataset)
    return replace(setting, config=private_rounds.settled(setting.config, setting.fleet))


def _check_validation(config: Config, engine: RemoteEngine | None) -> None:
    """Say what will not be measured where validation samples are on other machines.

    Raises:
        ConfigError: The run is to stop by what is not measured.
    """
    if engine is None or engine.validates or not config.data.validation:
        return
    if config.stop.patience is not None:
        raise ConfigError(
            "stop.patience goes by the validation score, and validation samples do not leave their "
            "nodes; leave it out, or run in one process"
        )
    log.warning(
        "validation samples do not leave their nodes: no accuracy by device, and no best round"
    )


@contextmanager
def _engine(config: Config) -> Iterator[PoolEngine | None]:
    """Start the worker processes first: they import while this process loads the data."""
    others = [group.model for group in config.fleet.group if group.model is not None]
    for name in (config.model.name, config.method.name, *others):
        if name.startswith(("__main__:", MEMORY)) and config.engine.workers > 1:
            raise ConfigError(
                f"worker processes cannot import {name.removeprefix(MEMORY)!r}; move it into a "
                f"file of its own, or set engine.workers to 1"
            )
    workers = config.engine.workers
    devices = placement.every(config.engine.device)
    with closing(PoolEngine(workers, devices)) if workers > 1 else nullcontext() as pool:
        yield pool


def _check_weights(setting: Setting, folder: RunFolder) -> None:
    """Raise if a run would start from other weights than those that its model once came with.

    Once a round is done, all weights are in its checkpoint.
    """
    model = setting.config.model
    if not model.came_built or checkpoint.newest(folder.checkpoints) is not None:
        return
    make = models.factory(model.name)
    if not isinstance(make, Built) or make.weights != model.weights:
        raise CheckpointError(
            f"no round of {str(folder.path)!r} is done yet, and the model has other weights than "
            "when the run was started; give it with those, or start a new run"
        )


def _federation(
    setting: Setting, folder: RunFolder, remote: RemoteEngine | None, cuts: Cuts | None
) -> Federation:
    config, method, dataset = setting.config, setting.method, setting.dataset
    if not folder.partition.exists():
        facts: dict[str, object] = {
            "plan.json": preview.rows_of(setting, wishes=False),
            "environment.json": environment(),
        }
        if cuts is not None:
            facts[FILE] = plain(cuts)
        for name, content in facts.items():
            checkpoint.write_bytes(folder.path / name, json.dumps(content, indent=1).encode())
        provenance.write(
            folder.path, setting, partitions.summary(setting.partition, *dataset.strata)
        )
        draft = folder.path / ".partition.tmp"
        partitions.save(setting.partition, draft)
        draft.rename(folder.partition)
        for note in dataset.notes:
            log.warning("data: %s", note)
    else:
        provenance.check(folder.path, setting)
        if said := drift(json.loads((folder.path / "environment.json").read_text())):
            log.warning("%s", said)
    engine: Engine
    if remote is None:
        together = config.engine.together
        engine = LocalEngine(DeviceRunner(method, dataset, setting.partition, together))
    else:
        remote.open(config, method, dataset, str(folder.partition))
        engine = remote
    folder.restore()  # A damaged checkpoint should show now, before anything is announced.
    measured = config.data.validation > 0 and engine.validates
    validation = Validation(setting.fleet, setting.partition) if measured else None
    privacy = None
    if config.privacy is not None:
        privacy = PrivateRounds(config.privacy, method, setting.fleet, folder.path)
    return Federation(
        config, method, setting.fleet, engine, folder, setting.begin, validation, privacy
    )


def new_name(config: Config) -> Path:
    """Return a folder under `runs/` that does not exist yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    data = Path(own_name(config.data.name)).name
    name = f"{stamp}-{config.method.name.rpartition(':')[2]}-{data}"
    path, number = Path("runs") / name, 2
    while path.exists():
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path
