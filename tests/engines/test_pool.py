"""The process pool gives the bits that the in-process engine gives, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sizewise import config as configs
from sizewise.config import Config
from sizewise.data import partitions
from sizewise.engines import Engine
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.engines.pool import PoolEngine
from sizewise.errors import EngineError
from sizewise.runs import preparation, session
from sizewise.runs.benefit import Validation
from sizewise.runs.federation import Federation
from sizewise.runs.folder import RunFolder

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108

# A model of the user's own, in a folder of the user's own: batch norm, dropout and a tensor that
# is not a float. Workers have to find it too.
FACTORY = """
from torch import nn

def noisy(classes, image):
    return nn.Sequential(
        nn.Conv2d(image[0], 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(4 * (image[1] - 2) * (image[2] - 2), classes),
    )
"""

FEDERATED = {
    "rounds": 2,
    "model": {"name": "pool_models:noisy"},
    "data": {"partition": "capped-dirichlet", "alpha": 1.0, "validation": 0.2},
    "fleet": {"devices": 12, "per_round": 7, "budgets": ["1kB", "1MB", "2MB"]},
    "recipe": {"norm": "tracked", "eval_batch": 100},
}
ALONE = {
    "rounds": 3,
    "model": {"name": "mlp", "args": {"hidden": [8]}},
    "method": {"name": "local"},
    "data": {"validation": 0.1},
    "fleet": {"devices": 6, "per_round": 4},
}


@pytest.fixture(scope="module", autouse=True)
def _users_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "pool_models.py").write_text(FACTORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, PoolEngine]]:
    """Pools of two and of three workers; starting one costs an import of torch."""
    opened = {count: PoolEngine(count) for count in (2, 3)}
    yield opened
    for pool in opened.values():
        pool.close()


def run(config: Config, path: Path, pool: PoolEngine | None) -> dict[str, Any]:
    setting = preparation.prepare(config)
    folder = RunFolder.create(path, config)
    partitions.save(setting.partition, folder.partition)
    engine: Engine = LocalEngine(DeviceRunner(setting.method, setting.dataset, setting.partition))
    if pool is not None:
        pool.open(config, setting.method, setting.dataset, str(folder.partition))
        engine = pool
    federation = Federation(config, setting.method, setting.fleet, engine, folder)
    try:
        return replace(federation, validation=Validation(setting.fleet, setting.partition)).run()
    finally:
        folder.release()


def logs(path: Path) -> list[dict[str, object]]:
    """Return all lines of both logs without their times."""
    lines = [
        json.loads(line)
        for name in ("updates.jsonl", "history.jsonl")
        for line in (path / name).read_text().splitlines()
    ]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def alive(group: int) -> list[str]:
    """Return the processes of a group that have not ended."""
    table = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in table.stdout.splitlines()]
    return [row[2] for row in rows if int(row[0]) == group and not row[1].startswith("Z")]


@pytest.mark.parametrize("tables", [FEDERATED, ALONE], ids=["federated", "local"])
def test_the_number_of_workers_does_not_change_a_bit(
    tables: dict[str, object], pools: dict[int, PoolEngine], tmp_path: Path
) -> None:
    config = configs.from_dict(tables)
    expected = run(config, tmp_path / "1", None)
    memories = RunFolder(tmp_path / "1").restore()[0].devices  # type: ignore[index]
    for count, pool in pools.items():
        result = run(config, tmp_path / str(count), pool)
        same = {k: v for k, v in result.items() if k not in ("seconds", "run_dir")}
        assert same.items() <= expected.items()
        assert result["validation"]["devices"] > 3
        assert logs(tmp_path / str(count)) == logs(tmp_path / "1")
        others = RunFolder(tmp_path / str(count)).restore()[0].devices  # type: ignore[index]
        assert others.keys() == memories.keys()
        for device, tensors in memories.items():
            torch.testing.assert_close(others[device], tensors, rtol=0, atol=0)
    assert bool(memories) == (tables is ALONE)


def test_the_engine_setting_starts_a_pool_and_ends_it(tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.glob("*"))
    config = configs.from_dict({**ALONE, "rounds": 1, "engine": {"workers": 2}})
    with session.started(config, tmp_path / "run") as federation:
        assert isinstance(federation.engine, PoolEngine)
        group = federation.engine._process.pid
        federation.run()
        assert len(alive(group)) == 2
    # Killed, but the system may still be taking them apart.
    deadline = time.monotonic() + 10
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(group)
    assert set(SHARED_MEMORY.glob("*")) <= before


def test_a_worker_that_dies_is_one_clear_error(tmp_path: Path) -> None:
    config = configs.from_dict(ALONE)
    pool = PoolEngine(1)
    try:
        os.killpg(pool._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="a worker process died"):
            run(config, tmp_path / "run", pool)
    finally:
        pool.close()


def test_an_exception_in_a_worker_is_told_in_the_main_process(
    pools: dict[int, PoolEngine], tmp_path: Path
) -> None:
    config = configs.from_dict(ALONE)
    setting = preparation.prepare(config)
    pools[2].open(config, setting.method, setting.dataset, str(tmp_path / "no partition"))
    state = setting.method.setup()
    plan = setting.method.plan(state, setting.fleet.device(0, 0), 0)
    with pytest.raises(EngineError, match="no partition is not a saved partition"):
        list(pools[2].train(state, [plan]))


def test_a_process_with_one_thread_is_forked_and_another_is_not() -> None:
    code = """
import threading
import sizewise.runs.session  # all that a run needs
from sizewise.engines.pool import PoolEngine

def kind():
    pool = PoolEngine(2)
    try:
        return type(pool._process).__name__
    finally:
        pool.close()

print(kind())
done = threading.Event()
threading.Thread(target=done.wait).start()
print(kind())
done.set()
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert answer.stdout.split() == ["_Forked", "Popen"]
