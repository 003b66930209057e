"""Real processes on loopback: a SuperLink, SuperNodes of different sizes, faults in mid-run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.config import Config
from sizewise.runs import session

pytest.importorskip("flwr")

from deployment import Deployment

from sizewise.flower import folder as flower_folder

MEMORY = ("100kB", "250kB", "2MB")
TABLES: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "cnn", "args": {"layers": [8, 16, 16]}},
    "data": {"name": "digits", "train_limit": 300, "test_limit": 100},
    "fleet": {"devices": 3, "per_round": 3},
    "method": {"name": "fedepth"},
    "recipe": {"batch": 16},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the in-process engine makes of the same devices."""
    tables = {**TABLES, "fleet": {**TABLES["fleet"], "budgets": list(MEMORY)}}
    folder = tmp_path_factory.mktemp("here") / "run"
    with session.started(configs.from_dict(tables), folder) as federation:
        return federation.run()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("flower"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def nodes(deployment: Deployment) -> dict[int, Any]:
    """The processes of the devices, by number; -1 is the SuperLink."""
    started: dict[int, Any] = {-1: deployment.superlink()}
    for number in range(len(MEMORY)):
        started[number] = deployment.supernode(number, settings(deployment, number))
    return started


def settings(deployment: Deployment, number: int) -> str:
    """Return what a node's owner says: its bytes, and where it keeps what it remembers."""
    return f"memory='{MEMORY[number]}' state-dir='{deployment.home}'"


def app_of(folder: Path, **changes: Any) -> Path:
    """Write the app of the test's config; the fleet's bytes are for the nodes to tell."""
    config: Config = configs.from_dict({**TABLES, **changes})
    flower_folder.write(folder / "app", config)
    return folder / "app"


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "app-run" / name
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def result_of(folder: Path, deployment: Deployment) -> dict[str, Any]:
    path = folder / "app-run" / "result.json"
    assert path.exists(), deployment.logs()
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_three_nodes_give_the_bits_of_one_process(
    deployment: Deployment, nodes: dict[int, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    run = deployment.run(app_of(tmp_path))
    run.wait(600)
    result = result_of(tmp_path, deployment)
    assert result["state_sha256"] == expected["state_sha256"]
    for key in ("accuracy", "budget_bytes", "peak_bytes", "bytes_up", "bytes_down", "refused"):
        assert result[key] == expected[key], key
    assert all(peak <= result["budget_bytes"][size] for size, peak in result["peak_bytes"].items())


def test_a_killed_server_goes_on_where_it_was(
    deployment: Deployment, nodes: dict[int, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    app = app_of(tmp_path)
    first = deployment.run(app)
    trained = [deployment.log(f"supernode-{n}").count("received train") for n in range(3)]

    def in_second_round() -> bool:
        logs = [deployment.log(f"supernode-{n}").count("received train") for n in range(3)]
        return bool(lines(tmp_path, "history.jsonl")) and logs[0] >= trained[0] + 2

    deployment.wait_for(in_second_round, "the second round")
    for process in (nodes[-1], first):
        deployment.kill(process)
    assert len(lines(tmp_path, "history.jsonl")) == 1
    # The nodes live on. They are in the SuperLink's database, and find it again by themselves.
    nodes[-1] = deployment.superlink()
    again = deployment.run(app)
    again.wait(600)
    result = result_of(tmp_path, deployment)
    assert result["state_sha256"] == expected["state_sha256"]
    assert result["rounds"] == 2
    assert result["refused"] == []


def test_a_node_killed_in_mid_round_is_reported_and_may_come_back(
    deployment: Deployment, nodes: dict[int, Any], tmp_path: Path
) -> None:
    before = deployment.log("supernode-2").count("received train")
    run = deployment.run(app_of(tmp_path, rounds=3))

    def at_work() -> bool:
        return deployment.log("supernode-2").count("received train") >= before + 2

    deployment.wait_for(at_work, "device 2 to begin its second round", run)
    deployment.kill(nodes[2])
    nodes[2] = deployment.supernode(2, settings(deployment, 2))
    run.wait(600)
    result = result_of(tmp_path, deployment)
    assert result["rounds"] == 3
    told = {
        (line["round"], line["device"]): line["refused"]
        for line in lines(tmp_path, "updates.jsonl")
    }
    assert told[1, 2] is None
    assert told[2, 2] == "its node left while it was at work"
    assert told[3, 2] is None
    accuracies = [line["accuracy"] for line in lines(tmp_path, "history.jsonl")]
    assert accuracies[-1] > accuracies[0]
    assert result["refused"][0]["devices"] == [2]
