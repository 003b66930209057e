"""A run computes on one thread, and gives back those that it found."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sizewise
from sizewise import config
from sizewise.common.threads import one_thread
from sizewise.errors import ConfigError, DataError, SizewiseError
from sizewise.runs import deployment, preparation, preview, session

CONFIG = config.from_dict(
    {
        "rounds": 1,
        "model": {"name": "linear"},
        "data": {"train_limit": 60, "test_limit": 20},
        "fleet": {"devices": 2, "per_round": 1},
    }
)


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def test_one_thread_also_ends_with_an_error() -> None:
    @one_thread()
    def fail() -> None:
        assert torch.get_num_threads() == 1
        raise DataError("some")

    with pytest.raises(DataError):
        fail()
    assert torch.get_num_threads() == 3


def test_runs_plans_and_exports(tmp_path: Path) -> None:
    seen = []
    with session.started(CONFIG, tmp_path / "run") as federation:
        federation.run(lambda line, totals: seen.append(torch.get_num_threads()))
    assert (seen, torch.get_num_threads()) == ([1], 3)
    with session.resumed(tmp_path / "run"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    preparation.prepare(CONFIG)
    preview.rows(CONFIG)
    deployment.export(tmp_path / "run", tmp_path / "model.safetensors", size="full")
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("wrong", [{"data": "no such data"}, {"method": "heterofl", "out": "/"}])
def test_a_run_that_cannot_start(wrong: dict[str, str]) -> None:
    with pytest.raises(SizewiseError):
        sizewise.federate("linear", **wrong)  # type: ignore[arg-type]
    assert torch.get_num_threads() == 3


def test_a_run_that_breaks_off(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise ConfigError("enough")

    with pytest.raises(ConfigError, match="enough"):
        sizewise.federate("linear", rounds=1, out=tmp_path / "run", observe=stop)
    assert torch.get_num_threads() == 3
