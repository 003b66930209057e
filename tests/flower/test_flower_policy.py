"""The round policy: deadlines, enough updates, too few, nodes that go and come back."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.config import Config
from sizewise.errors import ConfigError, EngineError, TooFewUpdates
from sizewise.fleet.round_policy import RoundPolicy

pytest.importorskip("flwr")

from fake_grid import FakeGrid, honest
from flwr.app import Message

from sizewise.flower import engine as flower
from sizewise.flower.replies import GONE
from sizewise.flower.roster import ANNOUNCE
from sizewise.flower.server import serve


def config_of(rounds: int = 1, fleet: Any = (), **policy: Any) -> Config:
    return configs.from_dict(
        {
            "rounds": rounds,
            "model": {"name": "linear"},
            "data": {"train_limit": 60, "test_limit": 20},
            "fleet": {"devices": 4, "per_round": 4, **dict(fleet)},
            "recipe": {"batch": 8},
            "engine": {"flower": {"wait": 0.2, **policy}},
        }
    )


@pytest.fixture
def grid() -> FakeGrid:
    return FakeGrid({"partition-id": n} for n in range(4))


class Stragglers:
    """Holds back what some nodes answer to the messages with some numbers, counted by node."""

    def __init__(self, *slow: tuple[int, int]) -> None:
        self._slow, self._count = slow, dict.fromkeys(range(100, 120), 0)

    def __call__(self, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return reply
        node = message.metadata.dst_node_id
        self._count[node] += 1
        return None if (node - 101, self._count[node]) in self._slow else reply


def lines(path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def told(path: Path) -> dict[tuple[int, int], str | None]:
    """Return why each device was refused, by (round, device)."""
    updates = lines(path, "updates.jsonl")
    return {(line["round"], line["device"]): line["refused"] for line in updates}


def test_a_straggler_is_late_then_noted_then_asked_again(grid: FakeGrid, tmp_path: Path) -> None:
    grid.tamper = Stragglers((1, 1))

    def after(line: Any, totals: Any) -> None:
        if line["round"] == 2:
            grid.release()

    result = serve(grid, config_of(3, deadline=0.3), tmp_path / "run", after, poll=0.01)
    assert told(tmp_path / "run") == {
        **dict.fromkeys(itertools.product((1, 2, 3), range(4))),
        (1, 1): flower.LATE,
        (2, 1): flower.BUSY,
    }
    (late,) = (line for line in lines(tmp_path / "run", "nodes.jsonl") if line["event"] == "late")
    assert (late["device"], late["round"]) == (1, 1)
    assert [entry["devices"] for entry in result["refused"]] == [[1], [1]]


def test_the_deadline_is_one_for_the_whole_round(grid: FakeGrid, tmp_path: Path) -> None:
    grid.tamper = Stragglers((0, 1), (1, 1), (3, 1))
    start = time.monotonic()
    serve(grid, config_of(deadline=0.5), tmp_path / "run", poll=0.01)
    assert list(told(tmp_path / "run").values()) == [flower.LATE, flower.LATE, None, flower.LATE]
    assert time.monotonic() - start >= 0.5


def test_a_reply_that_waits_behind_a_late_one_is_merged(
    grid: FakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the deadline, one more look is taken at those beyond the window."""
    monkeypatch.setattr(flower, "WINDOW", 1)
    grid.tamper = Stragglers((0, 1))
    serve(grid, config_of(deadline=0.2), tmp_path / "run", poll=0.01)
    assert list(told(tmp_path / "run").values()) == [flower.LATE, None, None, None]


def test_enough_updates_end_a_round(grid: FakeGrid, tmp_path: Path) -> None:
    grid.tamper = Stragglers((0, 1), (2, 1))
    start = time.monotonic()
    serve(grid, config_of(enough=2, deadline=600.0), tmp_path / "run", poll=0.01)
    assert list(told(tmp_path / "run").values()) == [flower.SPARE, None, flower.SPARE, None]
    assert time.monotonic() - start < 300


def test_a_round_with_too_few_updates_is_done_again(
    grid: FakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first try waited for in vain is waited for, noted and not merged."""
    grid.tamper = Stragglers((0, 1), (1, 1))
    settle = flower.FlowerEngine.settle

    def released(engine: flower.FlowerEngine) -> None:
        grid.release()
        settle(engine)

    monkeypatch.setattr(flower.FlowerEngine, "settle", released)
    config = config_of(minimum=3, deadline=0.2)
    result = serve(grid, config, tmp_path / "run", poll=0.01)
    assert result["refused"] == []
    (failed,) = (e for e in lines(tmp_path / "run", "nodes.jsonl") if e["event"] == "abandoned")
    assert (failed["updates"], failed["refused"]) == (2, {"0": flower.LATE, "1": flower.LATE})
    events = [line["event"] for line in lines(tmp_path / "run", "nodes.jsonl")]
    assert events.count("late") == 2
    assert len(lines(tmp_path / "run", "history.jsonl")) == 1


def test_a_run_stops_when_rounds_keep_failing(grid: FakeGrid, tmp_path: Path) -> None:
    grid.tamper = lambda message, reply: None if message.metadata.message_type == "train" else reply
    with pytest.raises(TooFewUpdates, match="round 1 got 0 of at least 1 updates"):
        serve(grid, config_of(attempts=2, deadline=0.1), tmp_path / "run", poll=0.01)
    # And goes on from there when it is started again.
    grid.tamper = honest
    assert serve(grid, config_of(), tmp_path / "run", poll=0.01)["rounds"] == 1


def test_a_node_that_left_is_missed_and_one_that_comes_back_is_welcome(
    grid: FakeGrid, tmp_path: Path
) -> None:
    def after(line: Any, totals: Any) -> None:
        if line["round"] == 1:
            del grid.nodes[103]
        if line["round"] == 2:
            grid.connect({"partition-id": 2})

    serve(grid, config_of(3), tmp_path / "run", after, poll=0.01)
    reasons = told(tmp_path / "run")
    assert [reasons[number, 2] for number in (1, 2, 3)] == [None, flower.ABSENT, None]
    events = [(e["event"], e.get("device")) for e in lines(tmp_path / "run", "nodes.jsonl")]
    assert events[4:] == [("left", 2), ("joined", 2)]


def test_of_two_live_nodes_with_one_number_the_second_is_refused_and_both_are_named(
    grid: FakeGrid, tmp_path: Path
) -> None:
    """Until the first is gone: then it may as well be that node, started again."""

    def after(line: Any, totals: Any) -> None:
        if line["round"] == 1:
            grid.connect({"partition-id": 2})
        if line["round"] == 2:
            del grid.nodes[103]

    serve(grid, config_of(3), tmp_path / "run", after, poll=0.01)
    trained = [node for kind, node in grid.asked if kind == "train"]
    assert trained == [101, 102, 103, 104, 101, 102, 103, 104, 101, 102, 105, 104]
    assert [kind for kind, node in grid.asked if node == 105].count(ANNOUNCE) == 1
    events = [(e["event"], e["node"]) for e in lines(tmp_path / "run", "nodes.jsonl")]
    assert events[4:] == [("refused", "105"), ("left", "103"), ("joined", "105")]
    reason = lines(tmp_path / "run", "nodes.jsonl")[4]["reason"]
    assert reason == (
        "node 105 says that it is device 2, which node 103 is; give one of them another "
        "partition-id"
    )


def test_a_run_that_cannot_start_names_the_nodes_with_one_number(tmp_path: Path) -> None:
    grid = FakeGrid({"partition-id": n} for n in (0, 1, 2, 2))
    with pytest.raises(EngineError, match=r"3 of 4 devices .* node 104 .* device 2, .* node 103"):
        serve(grid, config_of(), tmp_path / "run", poll=0.01)


def test_a_node_restarted_in_mid_round_is_not_waited_for(grid: FakeGrid, tmp_path: Path) -> None:
    """Its device is there again, as another node, once the old one is missed: its work is lost."""

    def restart(message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 103:
            grid.connect({"partition-id": 2})
            del grid.nodes[103]
            return None
        return reply

    grid.tamper = restart
    serve(grid, config_of(2, deadline=600.0), tmp_path / "run", poll=0.01)
    reasons = told(tmp_path / "run")
    assert [reasons[1, device] for device in range(4)] == [None, None, GONE, None]
    assert [reasons[2, device] for device in range(4)] == [None] * 4


def test_a_run_waits_for_its_nodes_and_says_how_many_came(grid: FakeGrid, tmp_path: Path) -> None:
    del grid.nodes[101]
    with pytest.raises(EngineError, match=r"3 of 4 devices are connected after 0\.2 s"):
        serve(grid, config_of(), tmp_path / "run", poll=0.01)
    assert not (tmp_path / "run").exists()
    result = serve(grid, config_of(nodes=3), tmp_path / "run", poll=0.01)
    assert result["refused"][0]["reason"] == flower.ABSENT


def test_a_run_under_way_goes_on_without_a_node_that_is_gone(
    grid: FakeGrid, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop(line: Any, totals: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        serve(grid, config_of(2), tmp_path / "run", stop, poll=0.01)
    del grid.nodes[104]
    assert serve(grid, config_of(2), tmp_path / "run", poll=0.01)["rounds"] == 2
    assert told(tmp_path / "run")[2, 3] == flower.ABSENT


def test_updates_beyond_the_window_wait_in_the_superlink(
    grid: FakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "WINDOW", 2)
    asked: list[int] = []
    pull = grid.pull_messages

    def counted(message_ids: Any) -> list[Message]:
        replies = pull(message_ids)
        asked.append(sum(reply.metadata.message_type == "train" for reply in replies))
        return replies

    monkeypatch.setattr(grid, "pull_messages", counted)
    grid.tamper = Stragglers((0, 1))
    serve(grid, config_of(deadline=0.2), tmp_path / "run", poll=0.01)
    # The first device holds up the others: of these, one is taken in before the deadline.
    assert [count for count in asked if count] == [1, 1, 1]


def test_nodes_that_cannot_say_who_they_are_are_noted(tmp_path: Path) -> None:
    nodes = [{}, {"partition-id": 0, "memory": "lots"}, {"partition-id": 0}]
    grid = FakeGrid(nodes)
    fleet = {"devices": 1, "per_round": 1}
    serve(grid, config_of(fleet=fleet), tmp_path / "run", poll=0.01)
    reasons = [line.get("reason", "") for line in lines(tmp_path / "run", "nodes.jsonl")]
    assert "partition-id" in reasons[0]
    assert "a node's memory must be" in reasons[1]
    assert reasons[2] == ""


def test_nodes_tell_their_budgets(tmp_path: Path) -> None:
    """Devices whose nodes say nothing keep what the config gives them."""
    grid = FakeGrid(
        [
            {"partition-id": 0, "memory": "1MB"},
            {"partition-id": 1, "memory": 1_000_000},
            {"partition-id": 2},
            {"partition-id": 3, "memory": "5kB"},
        ]
    )
    fleet = {"budgets": ["2MB", "3MB"]}
    result = serve(grid, config_of(fleet=fleet), tmp_path / "run", poll=0.01)
    assert result["budget_bytes"] == {"1MB": 10**6, "3MB": 3 * 10**6, "5kB": 5000}
    assert [entry["devices"] for entry in result["refused"]] == [[3]]
    saved = configs.load(tmp_path / "run/config.toml")
    assert [(g.count, g.memory) for g in saved.fleet.group] == [
        (2, 10**6),
        (1, 3 * 10**6),
        (1, 5000),
    ]


def test_a_node_with_less_memory_than_it_told_refuses(grid: FakeGrid, tmp_path: Path) -> None:
    grid.nodes[101].context.node_config["memory"] = "1MB"

    def after(line: Any, totals: Any) -> None:
        grid.nodes[101].context.node_config["memory"] = "1kB"

    serve(grid, config_of(2), tmp_path / "run", after, poll=0.01)
    assert told(tmp_path / "run")[1, 0] is None
    assert "it has no more than 1,000 now" in str(told(tmp_path / "run")[2, 0])


@pytest.mark.parametrize(
    "wrong",
    [{"deadline": 0.0}, {"wait": -1.0}, {"minimum": 0}, {"nodes": 0}, {"minimum": 3, "enough": 2}],
)
def test_a_policy_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RoundPolicy(**wrong)
