"""Every method gives the same bits on Flower's grid as in one process, also when it is resumed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.config import Config, StopConfig
from sizewise.errors import ConfigError
from sizewise.runs import catalogue, session
from sizewise.runs.folder import RunFolder

pytest.importorskip("flwr")

from fake_grid import FakeGrid, honest

from sizewise.flower.server import serve

BASE: dict[str, Any] = {
    "model": {"name": "cnn", "args": {"layers": [6, 8, 8]}},
    "data": {"train_limit": 120, "test_limit": 40},
    "fleet": {"devices": 4, "per_round": 3},
    "recipe": {"batch": 8, "lr": 0.05, "eval_batch": 40},
}
# Methods that remember something on their devices, and budgets at which all of them train.
REMEMBERING = {
    "local": [0.5, 1.0],
    "depthfl": [1.2, 2.0],
    "m-fedepth": [1.0, 4.0],
    "fedin": [2.0],
    "fedgkt": [2.0],
}
SMALL = {"client": "cnn", "client_args": {"layers": [6, 8]}}
OPTIONS = {
    "fedgkt": {**SMALL, "server_epochs": 1, "optimizers": "run"},
    "local": {"sizes": "width"},
}


def config_of(name: str, rounds: int = 2) -> Config:
    fleet = {**BASE["fleet"], "ratios": REMEMBERING.get(name, [0.5, 1.0])}
    method = {"name": name, **OPTIONS.get(name, {})}
    return configs.from_dict({**BASE, "rounds": rounds, "fleet": fleet, "method": method})


def in_process(config: Config, path: Path) -> dict[str, Any]:
    with session.started(config, path) as federation:
        return federation.run()


def grid_of(config: Config, **more: Any) -> FakeGrid:
    return FakeGrid({"partition-id": n, **more} for n in range(config.fleet.devices))


def facts(path: Path) -> list[dict[str, Any]]:
    """Return all lines of both logs without their times."""
    lines = [*log(path / "updates.jsonl"), *log(path / "history.jsonl")]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", catalogue.names("methods"))
def test_same_bits_as_in_one_process(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    expected = in_process(config, tmp_path / "here")
    result = serve(grid_of(config), config, tmp_path / "there", poll=0)
    differing = ("seconds", "run_dir")
    assert {k: v for k, v in result.items() if k not in differing} == {
        k: v for k, v in expected.items() if k not in differing
    }
    assert facts(tmp_path / "there") == facts(tmp_path / "here")


def test_validation_samples_stay_on_their_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nodes train on what devices train on in one process; the server measures no device."""
    config = config_of("heterofl")
    config = replace(config, data=replace(config.data, validation=0.2))
    expected = in_process(config, tmp_path / "here")
    assert expected["validation"]["devices"] == 4
    assert not caplog.text
    result = serve(grid_of(config), config, tmp_path / "there", poll=0)
    assert result["state_sha256"] == expected["state_sha256"]
    assert (result["validation"], result["best_round"]) == (None, None)
    assert "validation samples do not leave their nodes: no accuracy by device" in caplog.text
    stopping = replace(config, stop=StopConfig(patience=1))
    with pytest.raises(ConfigError, match="validation samples do not leave their nodes; leave it"):
        serve(grid_of(config), stopping, tmp_path / "stopping", poll=0)
    assert not (tmp_path / "stopping").exists()


@pytest.mark.parametrize("upload", ["bf16", "int8", "topk"])
@pytest.mark.parametrize("name", ["fedavg", "fedrolex", "depthfl"])
def test_updates_in_fewer_bytes_have_the_same_bits(name: str, upload: str, tmp_path: Path) -> None:
    """Also of methods whose devices remember something, or hold another part in every round."""
    config = config_of(name, rounds=3)
    full = in_process(config, tmp_path / "full")
    config = replace(config, recipe=replace(config.recipe, upload=upload))
    expected = in_process(config, tmp_path / "here")
    result = serve(grid_of(config), config, tmp_path / "there", poll=0)
    assert expected["state_sha256"] == result["state_sha256"] != full["state_sha256"]
    assert facts(tmp_path / "there") == facts(tmp_path / "here")
    assert expected["refused"] == full["refused"]
    share = expected["bytes_up"] / full["bytes_up"]
    assert share == pytest.approx({"bf16": 0.5, "int8": 0.25, "topk": 0.2}[upload], abs=0.08)


def test_private_rounds_have_the_same_bits(tmp_path: Path) -> None:
    tables = config_of("heterofl").to_dict()
    del tables["fleet"]["sampling"], tables["recipe"]["weighting"]
    private = {"noise": 1.0, "quantile": 0.5, "seed": 3}
    config = configs.from_dict({**tables, "privacy": private})
    expected = in_process(config, tmp_path / "one")
    result = serve(grid_of(config), config, tmp_path / "many", poll=0)
    assert result["state_sha256"] == expected["state_sha256"]
    assert result["privacy"] == expected["privacy"]
    assert result["privacy"]["epsilon"] > 0


def test_the_page_names_every_method() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/flower.md"
    rows = re.findall(r"^\| \[([a-z-]+)\]\(methods/.*\| yes \| (.*)\|$", page.read_text(), re.M)
    assert [name for name, _ in rows] == sorted(catalogue.names("methods"))
    assert {name for name, memory in rows if memory.strip()} == REMEMBERING.keys()


class Killed(Exception):
    pass


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("lost", ["after a round", "in a round"])
def test_what_devices_remember_survives_the_server(name: str, lost: str, tmp_path: Path) -> None:
    """A server that is started again is a new run to Flower: contexts are empty, files are not."""
    config = config_of(name, rounds=3)
    expected = in_process(config, tmp_path / "here")
    assert RunFolder(tmp_path / "here").restore()[0].devices  # type: ignore[index]
    grid = grid_of(config, **{"state-dir": str(tmp_path / "nodes")})

    def stop(line: Any, totals: Any) -> None:
        raise Killed

    calls = iter(range(10_000))

    def stop_in_round(message: Any, reply: Any) -> Any:
        # The fifth device that trains is the second of round 2: one has moved on in vain.
        if message.metadata.message_type == "train" and next(calls) == 4:
            raise Killed
        return reply

    if lost == "in a round":
        grid.tamper = stop_in_round
    with pytest.raises(Killed):
        serve(
            grid,
            config,
            tmp_path / "there",
            stop if lost == "after a round" else lambda line, totals: None,
            poll=0,
        )
    grid.tamper = honest
    grid.new_run()
    result = serve(grid, config, tmp_path / "there", poll=0)
    assert result["state_sha256"] == expected["state_sha256"]
    assert result["sizes"] == expected["sizes"]
    assert {line["event"] for line in log(tmp_path / "there/nodes.jsonl")} == {"joined"}


def test_a_device_that_lost_its_memory_begins_anew_and_says_so(tmp_path: Path) -> None:
    config = config_of("local")
    grid = grid_of(config)

    def forget(line: Any, totals: Any) -> None:
        grid.new_run()

    result = serve(grid, config, tmp_path / "there", forget, poll=0)
    assert result["refused"] == []
    lines = log(tmp_path / "there/nodes.jsonl")
    assert "forgot" in {line["event"] for line in lines}
    assert "began anew" in next(line["reason"] for line in lines if line["event"] == "forgot")


def test_memories_never_leave_their_devices(tmp_path: Path) -> None:
    config = config_of("local")
    serve(grid_of(config), config, tmp_path / "there", poll=0)
    kept = RunFolder(tmp_path / "there").restore()[0].devices  # type: ignore[index]
    assert kept
    for memory in kept.values():
        assert {name: tensor.numel() for name, tensor in memory.items()} == {"receipt": 32}
