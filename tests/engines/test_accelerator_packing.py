"""How many devices train at once on an accelerator follows from bytes, and nothing gets lost."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import second_device
from sizewise import config as configs
from sizewise.engines.packing import Accelerator
from sizewise.engines.pool import PoolEngine
from sizewise.errors import EngineError
from sizewise.runs import session
from sizewise.torch_tools import placement

# Pieces of 16, 28 and 40 MB that hold nearly all of it from beginning to end, and take their time
# without computing: how many are at work at once should not depend on how busy this machine is.
PIECES = """
import time

import torch
from torch import nn

from sizewise import Method
from sizewise.families.submodels import Width

class Table(nn.Module):
    def __init__(self, size, classes):
        super().__init__()
        self.register_buffer("table", torch.zeros(size), persistent=False)
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        time.sleep(0.02)
        return self.head(x.flatten(1) + self.table[:64])

def table(classes, width=1.0):
    return Table(int(width * 10_000_000), classes)

class Mixed(Method):
    def plan(self, state, device, round_index):
        return self.offer(device, round_index, Width((0.4, 0.7, 1.0)[device.id % 3]))
"""


@pytest.fixture(scope="module", autouse=True)
def _second_device() -> None:
    second_device.load()


def config_of(memory: str, devices: int = 4) -> configs.Config:
    return configs.from_dict(
        {
            "rounds": 1,
            "model": {"name": "packing_pieces:table"},
            "method": {"name": "packing_pieces:Mixed"},
            "data": {"train_limit": 20 * devices, "test_limit": 30},
            "fleet": {"devices": devices, "per_round": devices},
            "recipe": {"batch": 2, "epochs": 2, "eval_batch": 30},
            "engine": {"device": "secondary:0", "device_memory": memory},
        }
    )


@pytest.fixture(scope="module", autouse=True)
def _pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "packing_pieces.py").write_text(PIECES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all processes count together."""
    file = tmp_path_factory.mktemp("secondary") / "ledger"
    second_device.start_counting(file)
    return file


@pytest.fixture(scope="module")
def pool(ledger: Path) -> Iterator[PoolEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in second_device.environment(ledger).items():
            patch.setenv(name, value)
        engine = PoolEngine(16, placement.every("secondary:0"))
        yield engine
        engine.close()


def run(config: configs.Config, path: Path, pool: PoolEngine | None) -> str:
    with session.started(config, path, engine=pool) as federation:
        return str(federation.run()["state_sha256"])


def test_the_memory_is_used_and_never_exceeded(
    pool: PoolEngine, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised: list[int] = []
    promise = Accelerator.promise

    def noting(self: Accelerator, worker: int, need: int) -> None:
        promise(self, worker, need)
        promised.append(sum(self._promised.values()))

    monkeypatch.setattr(Accelerator, "promise", noting)
    for size, devices in ((100, 8), (200, 16), (400, 40)):
        second_device.start_counting(ledger, limit=size * 10**6)
        promised.clear()
        run(config_of(f"{size}MB", devices), tmp_path / f"{size}", pool)
        # Whether all who were promised memory have it at one moment is up to the machine's load.
        assert 0.8 * size * 10**6 <= max(promised) <= size * 10**6
        assert 0.5 * size * 10**6 <= second_device.counts(ledger)["peak"] <= size * 10**6


def test_too_little_memory_is_a_smaller_packing(
    pool: PoolEngine, ledger: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of("400MB", 8)
    second_device.start_counting(ledger, limit=80_000_000)
    with caplog.at_level(logging.WARNING):
        found = run(config, tmp_path / "run", pool)
    assert "secondary:0 was out of memory when" in caplog.text
    assert second_device.counts(ledger)["peak"] <= 80_000_000
    assert found == run(config, tmp_path / "alone", None)


def test_what_does_not_fit_alone_is_said(pool: PoolEngine, ledger: Path, tmp_path: Path) -> None:
    second_device.start_counting(ledger, limit=30_000_000)
    with pytest.raises(EngineError, match=r"training the .* model takes .* bytes on secondary:0"):
        run(config_of("30MB"), tmp_path / "refused", pool)
    with pytest.raises(EngineError, match="out of memory with a single device in training"):
        run(config_of("100MB"), tmp_path / "alone", pool)
