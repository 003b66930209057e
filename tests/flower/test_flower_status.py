"""What a server tells of its run: a table for people, a file for Prometheus."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.errors import ConfigError

pytest.importorskip("flwr")

from fake_grid import FakeGrid
from flwr.app import Message

from sizewise.flower import metrics, status
from sizewise.flower.server import serve

CONFIG = configs.from_dict(
    {
        "rounds": 2,
        "model": {"name": "linear"},
        "data": {"train_limit": 90, "test_limit": 20},
        "fleet": {"devices": 3, "per_round": 3},
        "recipe": {"batch": 8},
        "engine": {"flower": {"deadline": 0.2, "wait": 5.0}},
    }
)


def silent(message: Message, reply: Message) -> Message | None:
    """Lose what the third node has trained."""
    lost = message.metadata.message_type == "train" and message.metadata.dst_node_id == 103
    return None if lost else reply


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[status.Status]]:
    """A run of three devices, one of which never answers, and its status after each round."""
    folder = tmp_path_factory.mktemp("status") / "run"
    grid = FakeGrid([{"partition-id": n, "memory": "20MB"} for n in (0, 1, 2, 2)])
    grid.tamper = silent
    seen: list[status.Status] = []

    def look(line: Any, totals: Any) -> None:
        seen.append(status.read(folder))
        if len(seen) == 1:
            del grid.nodes[102]

    serve(grid, CONFIG, folder, look, poll=0.01)
    return folder, [*seen, status.read(folder)]


def test_who_is_there_and_what_it_cost(run: tuple[Path, list[status.Status]]) -> None:
    first, second, last = run[1]
    assert [each.state for each in first.devices] == ["waiting"] * 3
    assert [each.state for each in second.devices] == ["waiting", "gone", "waiting"]
    assert [each.state for each in last.devices] == ["finished"] * 3
    # Files are written in the background, so they may lag behind.
    assert (first.rounds <= 1, second.rounds <= 2, last.rounds) == (True, True, 2)
    assert [(each.merged, each.refused) for each in last.devices] == [(2, 0), (1, 1), (0, 2)]
    weight = last.devices[1].bytes_up
    assert last.devices[0].bytes_up == 2 * weight == 2 * last.devices[0].bytes_down // 2 > 0
    assert last.devices[1].reason == "no node of this device is connected"
    assert last.devices[2].reason == "its node has not answered since an earlier round"
    assert last.devices[0].memory == 20_000_000
    assert "104" in last.refused_nodes


def test_the_table(run: tuple[Path, list[status.Status]]) -> None:
    table = status.text(run[1][1]).splitlines()
    assert table[0].endswith(" rounds done, under way")
    words = [line.split() for line in table]
    assert ["device", "state", "memory", "merged"] in [line[:4] for line in words]
    assert ["1", "gone"] in [line[:2] for line in words]
    assert table[-1].startswith("node 104 is not in: node 104 says that it is device 2")


def test_the_file_for_prometheus(run: tuple[Path, list[status.Status]]) -> None:
    text = (run[0] / metrics.NAME).read_text()
    values = dict(re.findall(r"^sizewise_(\w+) ([0-9.]+)$", text, re.M))
    assert (values["round"], values["nodes"]) == ("2", "2")
    assert (values["updates_total"], values["refused_total"]) == ("3", "3")
    assert int(values["sent_bytes_total"]) > int(values["received_bytes_total"]) > 0
    for line in text.splitlines():
        assert re.fullmatch(
            r'# (HELP|TYPE) sizewise_\w+ .+|sizewise_\w+({device="\d+"})? \S+', line
        )


def test_who_works(tmp_path: Path) -> None:
    told = metrics.Metrics()
    told.open(tmp_path)
    assert metrics.read_working(tmp_path) == set()
    for device in (3, 11):
        told.asked(device, 1, 100)
    told.write(2, now=True)
    assert metrics.read_working(tmp_path) == {3, 11}
    lines = [
        {"time": 1.0, "event": "joined", "node": f"{n}", "device": n, "memory": None}
        for n in (3, 4)
    ]
    (tmp_path / "nodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [each.state for each in status.read(tmp_path).devices] == ["working", "waiting"]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run on Flower"):
        status.read(tmp_path)
