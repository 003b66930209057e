"""FedGKT: what is told and what stays, the server's training, and a whole run."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import rounds
from sizewise import config as configs
from sizewise.common import rng
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import BudgetTooSmall, ConfigError, UpdateRefused
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State, sha256
from sizewise.fleet.devices import Device
from sizewise.methods.fedgkt import FEATURES, LABELS, LOGITS, FedGKT
from sizewise.runs import preview, session
from sizewise.runs.folder import RunFolder, Totals
from sizewise.training.task import Task

SHALLOW, DEEP, OTHER = (f"mixed_models:{name}" for name in ("shallow", "deep", "other"))
DEVICES = [Device(number, "any") for number in range(3)]

MakeRunner = Callable[..., DeviceRunner]


@pytest.fixture
def make_runner(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> MakeRunner:
    """Return a maker of runners: a shallow model on devices, a deep one on the server."""

    def make(options: dict[str, Any] | None = None, **recipe: Any) -> DeviceRunner:
        task = make_task(DEEP, {}, **{"norm": "tracked", **recipe})
        chosen = {"client": SHALLOW, "server_epochs": 2, **(options or {})}
        return DeviceRunner(FedGKT(task, FedGKT.Options(**chosen)), dataset, partition)

    return make


def do_round(
    runner: DeviceRunner, state: State, round_index: int, devices: Sequence[Device] = DEVICES
) -> tuple[State, list[Update]]:
    """Do a round with all devices, or with some."""
    return rounds.do_round(runner, state, round_index, devices)


def test_devices_tell_of_all_samples_in_order_and_keep_their_weights(
    make_runner: MakeRunner,
) -> None:
    runner = make_runner()
    method: Any = runner.method
    state, updates = do_round(runner, method.setup(), 0)
    for update in updates:
        rows = runner.partition.shard(update.plan.device)
        assert update.tensors == {}
        assert set(update.sample_payload) == {FEATURES, LOGITS, LABELS}
        assert torch.equal(update.sample_payload[LABELS], runner.dataset.train_labels[rows])
        model: Any = method.submodels.build(method.small)
        model.load_state_dict(update.device_state)
        images = runner.transform(runner.dataset.train_inputs[rows], None)
        features = model.eval().stem(images)
        torch.testing.assert_close(update.sample_payload[FEATURES], features)
        torch.testing.assert_close(update.sample_payload[LOGITS], model(images))
    assert {name.partition(".")[0] for name in state.tensors} == {"blocks", "head"}
    assert "blocks.2.0.weight" in state.tensors


@pytest.mark.parametrize(
    ("order", "chunks"),
    [
        ("mixed", [(0, [8, 8, 7, 7])]),
        ("devices", [(0, [5]), (5, [10]), (15, [8, 7])]),
    ],
)
def test_the_server_trains_on_all_of_it_and_answers_each_sample(
    make_runner: MakeRunner, order: str, chunks: list[tuple[int, list[int]]]
) -> None:
    """A slow reference: one pass after the other over the joined samples."""
    runner = make_runner({"order": order}, batch=7, lr=0.02, weight_decay=1e-3)
    method: Any = runner.method
    before = method.setup()
    state, updates = do_round(runner, before, 0)
    features, labels = (
        torch.cat([update.sample_payload[name] for update in updates])
        for name in (FEATURES, LABELS)
    )
    model = method.submodels.build(method.main)
    model.load_state_dict(before.tensors)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9, weight_decay=1e-3)
    generator = rng.torch_generator(0, "server", 0)
    answers = torch.zeros(30, 3)
    for _ in range(2):
        for start, sizes in chunks:
            shuffled = start + torch.randperm(sum(sizes), generator=generator)
            for rows in shuffled.split(sizes):
                optimizer.zero_grad()
                logits = model(features[rows])
                F.cross_entropy(logits, labels[rows]).backward()
                optimizer.step()
                answers[rows] = logits.detach()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state.tensors[name], tensor)
    for number, rows in enumerate(torch.split(answers, [5, 10, 15])):
        torch.testing.assert_close(state.server_state[f"{LOGITS}/{number}"], rows)


def test_devices_learn_from_the_answers_from_their_second_round_on(make_runner: MakeRunner) -> None:
    runner = make_runner()
    method = runner.method
    state, _ = do_round(runner, method.setup(), 0, DEVICES[:2])
    plans = [method.plan(state, device, 1) for device in DEVICES]
    assert [plan.stages[0].work.label for plan in plans] == ["distil", "distil", "local"]
    assert torch.equal(method.payload(state, plans[0])[LOGITS], state.server_state[f"{LOGITS}/0"])
    assert method.payload(state, plans[2]) == {}
    taught = runner.train(state, plans[0])
    untaught = runner.train(state, plans[0], {})
    assert isinstance(taught, Update)
    assert isinstance(untaught, Update)
    assert taught.loss > untaught.loss  # A distance is added to the cross entropy.
    # A device that is not asked keeps its answers.
    later, _ = do_round(runner, state, 1, DEVICES[1:])
    assert torch.equal(later.server_state[f"{LOGITS}/0"], state.server_state[f"{LOGITS}/0"])
    assert not torch.equal(later.server_state[f"{LOGITS}/1"], state.server_state[f"{LOGITS}/1"])


def softened(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The distance of a pupil's logits from its teacher's, at temperature 3."""
    truth = (teacher / 3).softmax(1) + 1e-7
    return 9 * (truth * (truth.log() - (logits / 3).log_softmax(1))).sum(1).mean()


def test_optimizers_that_last_for_the_run_are_those_of_a_plain_loop(
    make_runner: MakeRunner,
) -> None:
    """One Adam with AMSGrad for a device and one for the server, over three rounds."""
    numbers = {"lr": 0.01, "weight_decay": 1e-4}
    runner = make_runner({"optimizers": "run"}, optimizer="amsgrad", batch=5, **numbers)
    method: Any = runner.method
    state, device = method.setup(), DEVICES[1]
    small, large = (
        method.submodels.build(method.small).train(),
        method.submodels.build(method.main).train(),
    )
    ours, theirs = (
        torch.optim.Adam(model.parameters(), amsgrad=True, **numbers) for model in (small, large)
    )
    rows = runner.partition.shard(1)
    images = runner.transform(runner.dataset.train_inputs[rows], None)
    labels, answers = runner.dataset.train_labels[rows], None
    for number in range(3):
        state, (update,) = do_round(runner, state, number, [device])
        small.train()
        order = torch.randperm(10, generator=rng.torch_generator(0, "batches", number, 1))
        for batch in order.split(5):
            ours.zero_grad()
            logits = small(images[batch])
            loss = F.cross_entropy(logits, labels[batch])
            (loss if answers is None else loss + softened(logits, answers[batch])).backward()
            ours.step()
        for name, tensor in small.state_dict().items():
            torch.testing.assert_close(update.device_state[name], tensor, rtol=1e-4, atol=1e-5)
        features = small.eval().stem(images).detach()
        answers, generator = torch.zeros(10, 3), rng.torch_generator(0, "server", number)
        for _ in range(2):
            order = torch.randperm(10, generator=generator)
            for batch in order.split(5):
                theirs.zero_grad()
                logits = large(features[batch])
                F.cross_entropy(logits, labels[batch]).backward()
                theirs.step()
                answers[batch] = logits.detach()
        for name, tensor in large.state_dict().items():
            torch.testing.assert_close(state.tensors[name], tensor, rtol=1e-4, atol=1e-5)
    assert int(state.server_state["optimizer/step/head.0.weight"]) == 3 * 4
    assert int(state.devices[1]["optimizer/step/head.weight"]) == 3 * 2
    # Fresh ones in each round do something else.
    fresh = make_runner({}, optimizer="amsgrad", batch=5, **numbers)
    other = method.setup()
    for number in range(2):
        other, _ = do_round(fresh, other, number, [device])
    assert not any(
        name.startswith("optimizer/") for name in {**other.server_state, **other.devices[1]}
    )


@pytest.mark.parametrize("optimizer", ["sgd", "amsgrad"])
def test_what_is_remembered_is_not_changed_and_within_the_predicted_bytes(
    make_runner: MakeRunner, optimizer: str
) -> None:
    runner = make_runner({"optimizers": "run"}, optimizer=optimizer, lr=0.01)
    state, _ = do_round(runner, runner.method.setup(), 0)
    before = [sha256(state.server_state), sha256(state.devices[2])]
    plan = runner.method.plan(state, DEVICES[2], 1)
    assert plan.predicted is not None
    update = runner.train(state, replace(plan, budget=plan.predicted))
    assert isinstance(update, Update), update
    assert update.peak_bytes == plan.predicted
    runner.method.merge(state, [update])
    assert [sha256(state.server_state), sha256(state.devices[2])] == before
    # A step is all it takes: unlike a fresh one, this optimiser has its moments from the start.
    short = replace(runner.method.task.recipe, max_steps=1)
    task = replace(runner.method.task, recipe=short, enforce=True)
    again = DeviceRunner(FedGKT(task, runner.method.options), runner.dataset, runner.partition)
    single = again.train(state, again.method.plan(state, DEVICES[2], 1))
    assert isinstance(single, Update), single
    assert single.peak_bytes == plan.predicted


def test_a_round_in_which_nobody_tells_anything_changes_nothing(make_runner: MakeRunner) -> None:
    state = make_runner().method.setup()
    assert make_runner().method.merge(state, []) is state


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda told: {**told, LABELS: told[LABELS] + 5}, "'labels' holds numbers outside 0 to 2"),
        (lambda told: {**told, LABELS: told[LABELS] - 5}, "'labels' holds numbers outside 0 to 2"),
        (lambda told: {**told, LABELS: told[LABELS].float()}, "'labels' is torch.float32"),
        (lambda told: {**told, FEATURES: told[FEATURES][:2]}, "'features' is .* of shape"),
        (lambda told: {**told, LOGITS: told[LOGITS] * float("nan")}, "not finite"),
        (lambda told: {FEATURES: told[FEATURES]}, "was asked for and did not come"),
    ],
)
def test_what_does_not_fit_is_refused(make_runner: MakeRunner, damage: Any, reason: str) -> None:
    runner = make_runner()
    _, updates = do_round(runner, runner.method.setup(), 0)
    traffic = runner.method.traffic(updates[1].plan, updates[1].samples)
    with pytest.raises(UpdateRefused, match=reason):
        traffic.check(damage(updates[1].sample_payload))


def test_clipping_and_noise_blur_features_and_logits(make_runner: MakeRunner) -> None:
    runner = make_runner({"clip": 0.25})
    _, updates = do_round(runner, runner.method.setup(), 0)
    for update in updates:
        for name in (FEATURES, LOGITS):
            assert float(update.sample_payload[name].norm(dim=1).max()) <= 0.25 + 1e-6
    noisy = make_runner({"noise": 0.5})
    _, others = do_round(noisy, noisy.method.setup(), 0)
    _, plain = do_round(make_runner(), make_runner().method.setup(), 0)
    added = others[2].sample_payload[FEATURES] - plain[2].sample_payload[FEATURES]
    assert 0.3 < float(added.std()) < 0.7
    assert torch.equal(others[2].sample_payload[LABELS], plain[2].sample_payload[LABELS])


def test_predicted_bytes_hold_what_a_step_needs(make_runner: MakeRunner) -> None:
    runner = make_runner(momentum=0.9)
    state, _ = do_round(runner, runner.method.setup(), 0)
    plan = runner.method.plan(state, DEVICES[2], 1)
    assert plan.predicted is not None
    update = runner.train(state, replace(plan, budget=plan.predicted))
    assert isinstance(update, Update), update
    assert update.peak_bytes == plan.predicted
    assert "out of budget" in str(runner.train(state, replace(plan, budget=plan.predicted - 1)))
    with pytest.raises(BudgetTooSmall):
        runner.method.plan(state, replace(DEVICES[2], memory=plan.predicted - 1), 1)


# ---- a whole run

TABLES: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": DEEP},
    "data": {"train_limit": 90, "test_limit": 40},
    "fleet": {"devices": 3, "per_round": 3},
    "method": {"name": "fedgkt", "client": SHALLOW, "server_epochs": 2},
    "recipe": {"batch": 8, "eval_batch": 20},
}


def trained(path: Path, **tables: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with session.started(configs.from_dict({**TABLES, **tables}), path / "run") as federation:
        result = federation.run()
    lines = (path / "run/updates.jsonl").read_text().splitlines()
    return result, [json.loads(line) for line in lines]


def test_devices_are_evaluated_with_and_without_the_server(tmp_path: Path) -> None:
    result, lines = trained(tmp_path)
    alone = [f"device {number}" for number in range(3)]
    together = [f"{name} with server" for name in alone]
    assert list(result["sizes"]) == alone + together
    expected = sum(result["sizes"][name] for name in together) / 3
    assert result["accuracy"] == pytest.approx(expected)
    up = 30 * (6 * 4 + 10 * 4 + 8)
    assert [line["bytes_up"] for line in lines] == [up] * 9
    assert [line["bytes_down"] for line in lines] == [0] * 3 + [30 * 10 * 4] * 6
    row = preview.rows(configs.from_dict(TABLES))[0]
    assert (row["bytes_up"], row["bytes_down"]) == (up, 30 * 10 * 4)


def test_with_its_server_it_learns(tmp_path: Path) -> None:
    data = {"train_limit": 600, "test_limit": 200}
    recipe = {**TABLES["recipe"], "batch": 16, "lr": 0.05, "eval_batch": 200, "eval_every": 8}
    result, _ = trained(tmp_path, data=data, recipe=recipe, rounds=8)
    assert result["accuracy"] > 0.4


def test_workers_do_not_change_a_bit(tmp_path: Path) -> None:
    one, _ = trained(tmp_path / "one")
    two, _ = trained(tmp_path / "two", engine={"workers": 2})
    assert (one["state_sha256"], one["sizes"]) == (two["state_sha256"], two["sizes"])


def test_a_resumed_run_goes_on_with_the_optimizers(tmp_path: Path) -> None:
    tables = {
        **TABLES,
        "method": {**TABLES["method"], "optimizers": "run"},
        "recipe": {**TABLES["recipe"], "optimizer": "amsgrad", "lr": 0.01},
    }
    config = configs.from_dict(tables)
    with session.started(config, tmp_path / "whole") as federation:
        expected = federation.run()
    with session.started(config, tmp_path / "run") as federation:
        federation.round(federation.method.setup(), Totals(), 0)
    with session.resumed(tmp_path / "run") as federation:
        assert federation.run()["state_sha256"] == expected["state_sha256"]
    ends = [RunFolder(tmp_path / name).restore() for name in ("whole", "run")]
    (whole, _), (resumed, _) = (end or pytest.fail("no checkpoint") for end in ends)
    assert sha256(whole.server_state) == sha256(resumed.server_state)
    assert any(name.startswith("optimizer/largest/") for name in whole.server_state)
    for number, device_state in whole.devices.items():
        assert any(name.startswith("optimizer/largest/") for name in device_state)
        assert sha256(device_state) == sha256(resumed.devices[number])
    plain, _ = trained(tmp_path / "fresh", recipe=tables["recipe"])
    assert plain["state_sha256"] != expected["state_sha256"]


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"method": {"name": "fedgkt", "client": OTHER}}, "gives features of shape .8,."),
        ({"method": {"name": "fedgkt", "client": SHALLOW, "server_epochs": 0}}, "at least 1"),
        ({"method": {"name": "fedgkt", "client": SHALLOW, "temperature": 0.0}}, "must be positive"),
        ({"recipe": {"norm": "per_submodel"}}, "use 'batch', 'sbn' or 'tracked'"),
        ({"recipe": {"eval_memory": "1MB"}}, "leave them out"),
    ],
)
def test_what_cannot_be_is_said_before_a_folder_is_made(
    tmp_path: Path, tables: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        trained(tmp_path, **tables)
    assert not (tmp_path / "run").exists()
