"""The round loop: what is merged, what is refused, and who takes part when."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sizewise import config as configs
from sizewise.engines import Outcome
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.errors import ConfigError, NobodyCanTrain, NothingMerged
from sizewise.exchange.plan import Plan, Refusal, Update
from sizewise.exchange.state import State, sha256
from sizewise.methods.fedavg import FedAvg
from sizewise.runs import preparation, session
from sizewise.runs.federation import Federation, check_fleet
from sizewise.runs.folder import RunFolder, Totals
from sizewise.training.evaluation import Score

Tamper = Callable[[Update], Outcome]

TABLES: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "linear"},
    "data": {"train_limit": 300, "test_limit": 50},
    "fleet": {"devices": 4, "per_round": 4},
}


class FakeEngine:
    """Trains for real, then does something to every update; evaluates to a made-up score."""

    def __init__(self, runner: DeviceRunner, tamper: Tamper) -> None:
        self.local = LocalEngine(runner)
        self.tamper = tamper

    def train(self, state: State, plans: Sequence[Plan]) -> Iterator[Outcome]:
        for outcome in self.local.train(state, plans):
            yield self.tamper(outcome) if isinstance(outcome, Update) else outcome

    def evaluate(self, state: State) -> Mapping[str, Score]:
        return {"full": Score(counts=(1, 4), loss_sum=2.0, samples=4)}

    def close(self) -> None:
        self.local.close()


def federation(path: Path, tamper: Tamper = lambda update: update, **tables: object) -> Federation:
    config = configs.from_dict({**TABLES, **tables})
    setting = preparation.prepare(config)
    runner = DeviceRunner(setting.method, setting.dataset, setting.partition)
    folder = RunFolder.create(path, config)
    folder.release()
    engine = FakeEngine(runner, tamper)
    return Federation(config, setting.method, setting.fleet, engine, folder)


def updates(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "updates.jsonl").read_text().splitlines()]


def history(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]


def with_nan(update: Update) -> Update:
    bias = update.tensors["head.bias"].clone()
    bias[3] = float("nan")
    return replace(update, tensors={**update.tensors, "head.bias": bias})


def with_other_shape(update: Update) -> Update:
    return replace(update, tensors={**update.tensors, "head.bias": torch.zeros(11)})


def with_other_type(update: Update) -> Update:
    return replace(update, tensors={**update.tensors, "head.bias": torch.zeros(10).double()})


def with_another_tensor(update: Update) -> Update:
    return replace(update, tensors={**update.tensors, "backdoor": torch.zeros(1)})


SPOILT = {
    with_nan: "'head.bias' holds values that are not finite",
    with_other_shape: "'head.bias' is torch.float32 of shape (11,), expected torch.float32 of "
    "shape (10,)",
    with_other_type: "'head.bias' is torch.float64",
    with_another_tensor: "'backdoor' was never sent to this device",
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_update_is_refused_whole_and_recorded(spoil: Tamper, tmp_path: Path) -> None:
    """Nothing of it is merged: the others' mean is what it would be without that device."""

    def silent(update: Update) -> Outcome:
        plan = update.plan
        return (
            Refusal(plan.device, plan.round, plan.group, "silent") if plan.device == 2 else update
        )

    spoilt = federation(tmp_path / "spoilt", lambda u: spoil(u) if u.plan.device == 2 else u).run()
    absent = federation(tmp_path / "absent", silent).run()
    assert spoilt["state_sha256"] == absent["state_sha256"]
    (entry,) = spoilt["refused"]
    assert (entry["group"], entry["times"], entry["devices"]) == ("any", 3, [2])
    assert SPOILT[spoil] in entry["reason"]
    refused = [line for line in updates(tmp_path / "spoilt") if line["refused"]]
    assert [(line["round"], line["device"]) for line in refused] == [(1, 2), (2, 2), (3, 2)]
    assert [line["refused"] for line in history(tmp_path / "spoilt")] == [1, 1, 1]
    assert spoilt["bytes_up"] == 3 * 3 * 650 * 4


@pytest.mark.parametrize(
    "server", ["fedavg", "fedavgm", "fedadam", "fedadamw", "fedyogi", "fedadagrad"]
)
def test_a_round_in_which_nobody_delivers_keeps_the_state(server: str, tmp_path: Path) -> None:
    """Also when the server has momentum that would carry it on."""

    def only_first_round(update: Update) -> Update:
        return update if update.plan.round == 0 else with_nan(update)

    run = federation(tmp_path / "run", only_first_round, recipe={"server": server})
    first = run.round(run.method.setup(), Totals(), 0)
    second = run.round(first[0], first[1], 1)
    assert sha256(second[0].tensors) == sha256(first[0].tensors)
    assert sha256(second[0].server_state) == sha256(first[0].server_state)
    assert (server == "fedavg") == (not first[0].server_state)
    assert second[2]["devices"] == 0
    assert second[2]["train_loss"] is None
    assert run.run()["rounds"] == 3


def test_a_run_in_which_nothing_was_ever_merged_is_an_error(tmp_path: Path) -> None:
    """Its folder is complete and says so, and so does whoever goes on with it."""
    run = federation(tmp_path / "run", with_nan)
    before = sha256(run.method.setup().tensors)
    expected = r"no update was merged in 3 rounds.* 'head.bias' holds values .* lower recipe.lr"
    with pytest.raises(NothingMerged, match=expected) as caught:
        run.run()
    assert caught.value.exit_code == 3
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["error"] == str(caught.value)
    assert result["state_sha256"] == before
    with pytest.raises(NothingMerged, match=r"no update was merged in 3 rounds"):
        run.run()


def test_one_merged_update_is_enough(tmp_path: Path) -> None:
    def once(update: Update) -> Update:
        return update if (update.plan.round, update.plan.device) == (1, 2) else with_nan(update)

    result = federation(tmp_path / "run", once).run()
    assert result["error"] is None
    assert [line["devices"] for line in history(tmp_path / "run")] == [0, 1, 0]


def test_devices_without_data_or_budget_do_not_stop_the_others(tmp_path: Path) -> None:
    fleet = {"devices": 4, "per_round": 4, "budgets": ["1kB", "1MB"]}
    result = federation(tmp_path / "run", fleet=fleet).run()
    (entry,) = result["refused"]
    assert (entry["group"], entry["times"], entry["devices"]) == ("1kB", 6, [0, 1])
    assert "needs 18,812 bytes, the device has 1,000" in entry["reason"]
    assert result["peak_bytes"] == {"1kB": None, "1MB": 18812}
    assert result["budget_bytes"] == {"1kB": 1000, "1MB": 1_000_000}


def test_joins_and_upgrades_hold_from_their_round_on(tmp_path: Path) -> None:
    fleet = {
        "devices": 4,
        "per_round": 4,
        "budgets": ["1kB", "1MB"],
        "event": [
            {"round": 2, "upgrade": "1kB", "count": 1, "memory": "2MB"},
            {"round": 3, "join": 2, "memory": "4MB"},
        ],
    }
    run = federation(tmp_path / "run", fleet=fleet)
    result = run.run()
    lines = updates(tmp_path / "run")
    trained = {
        number: {line["device"]: line["group"] for line in lines if line["round"] == number}
        for number in (1, 2, 3)
    }
    assert trained[1] == {0: "1kB", 1: "1kB", 2: "1MB", 3: "1MB"}
    assert trained[2] == {0: "2MB", 1: "1kB", 2: "1MB", 3: "1MB"}
    assert len(trained[3]) == 4
    assert {4, 5} & trained[3].keys()
    assert all(trained[3][number] == "4MB" for number in {4, 5} & trained[3].keys())
    took_part = {(line["round"], line["device"]) for line in lines if line["refused"] is None}
    assert (1, 0) not in took_part
    assert (2, 0) in took_part
    assert list(result["budget_bytes"]) == ["1kB", "1MB", "4MB", "2MB"]
    assert result["peak_bytes"].keys() == result["budget_bytes"].keys()


def test_every_metered_peak_is_the_predicted_one_and_within_budget(tmp_path: Path) -> None:
    """Half of the devices have exactly what it takes, the others lack a byte of it."""
    fleet = {"devices": 4, "per_round": 4, "budgets": [18811, 18812]}
    federation(tmp_path / "run", fleet=fleet).run()
    lines = updates(tmp_path / "run")
    assert [line["device"] for line in lines if line["refused"]] == [0, 1] * 3
    trained = [line for line in lines if not line["refused"]]
    assert [line["device"] for line in trained] == [2, 3] * 3
    for line in trained:
        assert line["peak_bytes"] == line["predicted"] == line["budget"] == 18812


def test_evaluates_when_asked_and_always_at_the_end(tmp_path: Path) -> None:
    result = federation(tmp_path / "run", recipe={"eval_every": 2}).run()
    assert [line.get("accuracy") for line in history(tmp_path / "run")] == [None, 0.25, 0.25]
    assert result["accuracy"] == 0.25
    assert history(tmp_path / "run")[1]["test_loss"] == {"full": 0.5}


def test_the_observer_sees_each_round_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run = federation(tmp_path / "run")
    run.run(lambda line, totals: seen.append((line["round"], totals.rounds)))
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_flops_count_the_samples_that_were_trained_on(tmp_path: Path) -> None:
    recipe = {"epochs": 2, "batch": 10, "max_steps": 3}
    run = federation(tmp_path / "run", recipe=recipe, rounds=1)
    run.run()
    (first, *_) = updates(tmp_path / "run")
    assert (first["samples"], first["steps"]) == (75, 3)
    stage = run.method.task.stage(0)
    assert first["flops"] == 30 * run.method.flops_per_sample(run.method.main, stage)


def test_a_new_run_sets_its_method_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    setup = FedAvg.setup
    monkeypatch.setattr(FedAvg, "setup", lambda method: calls.append(1) or setup(method))
    tables = {"rounds": 1, "data": {"train_limit": 60, "test_limit": 20}}
    chosen = {**tables, "model": {"name": "linear"}, "method": {"name": "fedavg"}}
    with session.started(configs.from_dict(chosen), tmp_path / "run") as federation:
        federation.run()
    assert len(calls) == 1


def test_nobody_can_take_part(tmp_path: Path) -> None:
    fleet = {"devices": 4, "per_round": 4, "budgets": ["1kB", "18811"]}
    run = federation(tmp_path / "run", fleet=fleet)
    with pytest.raises(NobodyCanTrain, match=r"largest budget is 18,811 bytes .* least 18,812"):
        check_fleet(run.method, run.fleet, run.method.setup())


METHOD = """
from dataclasses import dataclass

from sizewise.methods.fedavg import FedAvg

class Halved(FedAvg):
    @dataclass(frozen=True)
    class Options(FedAvg.Options):
        share: float = 0.5

    def merge(self, state, updates):
        new = super().merge(state, updates)
        share = self.options.share
        tensors = {n: t.lerp(new.tensors[n], share) for n, t in state.tensors.items()}
        return type(new)(tensors)

not_a_method = 3
"""


@pytest.fixture
def _users_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their").mkdir()
    (tmp_path / "their" / "__init__.py").touch()
    (tmp_path / "their" / "methods.py").write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_users_method")
def test_a_method_of_the_users_own(tmp_path: Path) -> None:
    def run(folder: str, **method: object) -> str:
        return str(federation(tmp_path / folder, method=method).run()["state_sha256"])

    plain, whole, half = (
        run("plain", name="fedavg"),
        run("whole", name="their.methods:Halved", share=1.0),
        run("half", name="their.methods:Halved"),
    )
    assert plain == whole != half
    assert configs.load(tmp_path / "half" / "config.toml").method.options["share"] == 0.5


@pytest.mark.usefixtures("_users_method")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("their.methods:Missing", "cannot be imported"),
        ("nowhere.at_all:Method", "cannot be imported: No module named 'nowhere'"),
        ("their.methods:not_a_method", "holds no class derived from sizewise.Method"),
    ],
)
def test_a_method_that_is_none(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.from_dict({"method": {"name": name}})
