"""A fleet in a box: many nodes in one process, and faults that can be turned on."""

import json
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise import config as configs
from sizewise.errors import ConfigError

pytest.importorskip("flwr")

from deployment import Deployment

from sizewise.flower import folder as flower_folder
from sizewise.flower.box import Box, read_numbers
from sizewise.flower.connection import Place
from sizewise.flower.faults import Faults, read_faults


def test_numbers_of_devices() -> None:
    assert read_numbers("0-3") == [0, 1, 2, 3]
    assert read_numbers("7, 2-4") == [7, 2, 3, 4]
    for wrong in ("", "a", "3-", "-3", "1,1", "5-2", "0-3,2"):
        with pytest.raises(ConfigError, match="--devices"):
            read_numbers(wrong)


def test_faults_come_as_often_as_they_should() -> None:
    often = {"die": 0.1, "lose": 0.2, "late": 0.15, "duplicate": 0.05, "cut": 0.1, "clock": 0.2}
    faults = Faults(**often, seconds=7, shuffle=2)
    drawn = [faults.draw(device, number) for device in range(100) for number in range(40)]
    shares = Counter(fate.kind for fate in drawn)
    for kind, share in often.items():
        assert shares[kind] / 4000 == pytest.approx(share, abs=0.02)
    assert all(7 <= fate.delay <= 9 for fate in drawn if fate.kind == "late")
    assert all(0 <= fate.delay <= 2 for fate in drawn if fate.kind != "late")
    assert {fate.kind for fate in (Faults().draw(0, n) for n in range(99))} == {""}


@given(seed=st.integers(0, 99), device=st.integers(0, 99), number=st.integers(0, 99))
def test_faults_can_be_repeated(seed: int, device: int, number: int) -> None:
    faults = Faults(die=0.3, late=0.3, shuffle=5, seed=seed)
    assert faults.draw(device, number) == faults.draw(device, number)


def test_faults_that_cannot_be_are_refused() -> None:
    assert read_faults({"late": 0.5, "seconds": 3}) == Faults(late=0.5, seconds=3)
    for wrong in ({"die": 1.1}, {"die": 0.6, "late": 0.6}, {"lose": -0.1}, {"seconds": -1}):
        with pytest.raises(ConfigError, match="shares of messages"):
            read_faults(wrong)
    with pytest.raises(ConfigError, match="did you mean 'late'"):
        read_faults({"lat": 0.1})


def test_nobody_is_heard_while_the_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    box = Box(Place("localhost:1"), [0], {}, 0.1, Faults(cut=1.0, seconds=40))
    monkeypatch.setattr(box._stop, "wait", waited.append)
    node, task = Mock(), Mock(kind="train")
    box._answer(0, node, task)
    assert waited == [40]
    (outgoing,) = box._outgoing
    assert outgoing.reply is node.answer.return_value  # It is sent when the line is back.


def test_every_device_is_accounted_for(tmp_path: Path) -> None:
    """Eight nodes in one process, with every fault there is, against a real SuperLink."""
    devices, rounds = 8, 2
    config = configs.from_dict(
        {
            "rounds": rounds,
            "model": {"name": "linear"},
            "data": {"train_limit": 240, "test_limit": 60},
            "fleet": {"devices": devices, "per_round": devices},
            "recipe": {"batch": 8, "lr": 0.1},
            "engine": {"flower": {"deadline": 6.0, "enough": 5, "minimum": 2}},
        }
    )
    flower_folder.write(tmp_path / "app", config)
    deployment = Deployment(tmp_path / "flower")
    faults = "die=0.1 lose=0.1 late=0.1 duplicate=0.3 clock=0.3 seconds=8 shuffle=0.3"
    try:
        deployment.superlink()
        deployment.start(
            "box",
            *(sys.executable, "-m", "sizewise", "flower", "box", "--insecure", "--poll", "0.1"),
            *("--superlink", deployment.address, "--heartbeat", "10", "--faults", faults),
            *("--devices", f"0-{devices - 1}"),
        )
        deployment.run(tmp_path / "app").wait(300)
        assert (tmp_path / "app-run/result.json").exists(), deployment.logs()
    finally:
        deployment.close()
    text = (tmp_path / "app-run/updates.jsonl").read_text()
    told = [json.loads(line) for line in text.splitlines()]
    everybody = [(n + 1, device) for n in range(rounds) for device in range(devices)]
    assert sorted((line["round"], line["device"]) for line in told) == everybody
    merged = Counter(line["round"] for line in told if line["refused"] is None)
    assert min(merged[n + 1] for n in range(rounds)) >= 2
    assert "duplicate" in deployment.log("box")
    assert ": clock" in deployment.log("box")
