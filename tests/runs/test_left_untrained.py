"""What no device trains is said before a run, and is what the run leaves as it began."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from sizewise import config as configs
from sizewise.methods import names
from sizewise.report import tables
from sizewise.runs import preview, session
from sizewise.runs.preparation import Setting, prepare
from sizewise.runs.untrained import untrained

LAYERS = [4, 8, 16, 32]


def config(method: str, *budgets: str, **recipe: Any) -> configs.Config:
    return configs.from_dict(
        {
            "rounds": 2,
            "model": {"name": "cnn", "args": {"layers": LAYERS}},
            "data": {"train_limit": 120, "test_limit": 20},
            "fleet": {"devices": 4, "per_round": 4, "budgets": list(budgets)},
            "method": {"name": method},
            "recipe": {"batch": 16, **recipe},
        }
    )


def needs(setting: Setting, *runs: tuple[int, int]) -> int:
    """Return the bytes that FeDepth needs for runs of blocks."""
    scheduler = setting.method.scheduler  # type: ignore[attr-defined]
    return max(scheduler.peak(scheduler.run(None, *run, ())) for run in runs)


@pytest.fixture(scope="module")
def weak() -> configs.Config:
    """A fleet that holds the last block and not the first."""
    plain = prepare(config("fedepth", "1GB"))
    budget, first = needs(plain, (2, 3)), needs(plain, (0, 1))
    assert budget < first
    return config("fedepth", f"{budget}B")


def test_what_nobody_trains_is_what_stays_as_it_began(
    weak: configs.Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = untrained(prepare(weak))
    assert found is not None
    with caplog.at_level(logging.WARNING), session.started(weak, tmp_path / "run") as federation:
        assert str(found) in caplog.text
        federation.run()
        restored = federation.folder.restore()
    assert restored is not None
    before, after = prepare(weak).start.tensors, restored[0].tensors
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert set(found.names) == same
    sizes = {name: tensor.numel() for name, tensor in before.items()}
    assert found.share == sum(sizes[name] for name in same) / sum(sizes.values())


def test_plan_says_it(weak: configs.Config, capsys: pytest.CaptureFixture[str]) -> None:
    rows = preview.rows(weak)
    tables.show_plan(rows)
    assert rows[0]["untrained"]["said"] in capsys.readouterr().out
    assert "no device trains" in rows[0]["untrained"]["said"]
    assert "stem.conv.weight" in rows[0]["untrained"]["said"]


@pytest.mark.parametrize("method", [n for n in names() if n not in ("fedin", "fedgkt", "fedepth")])
def test_a_fleet_with_room_trains_all(method: str) -> None:
    if "lora" in method:
        pytest.skip("adapters want a transformer")
    assert untrained(prepare(config(method, "40kB", "1GB"))) is None


def test_where_all_devices_are_refused_that_is_said_instead() -> None:
    assert untrained(prepare(config("fedavg", "10kB"))) is None
