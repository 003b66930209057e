"""FedIN: what is sent and what stays, the store, and a device's round by a slow reference."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rounds
from sizewise import cli
from sizewise import config as configs
from sizewise.common import rng
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.errors import BudgetTooSmall, ConfigError, UpdateRefused
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.fedin import EARLY, LATE, FedIN
from sizewise.methods.fedin.architectures import Architecture
from sizewise.methods.local import Local
from sizewise.runs import preview, session
from sizewise.training.task import Task

SHALLOW, DEEP, OTHER = (f"mixed_models:{name}" for name in ("shallow", "deep", "other"))
DEVICES = [Device(0, "a", model=SHALLOW), Device(1, "b", model=DEEP), Device(2, "c", model=DEEP)]

MakeRunner = Callable[..., DeviceRunner]


@pytest.fixture
def make_runner(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> MakeRunner:
    """Return a maker of runners: three devices of two architectures by default."""

    def make(
        options: dict[str, Any] | None = None,
        model: str = SHALLOW,
        models: tuple[str, ...] = (SHALLOW, DEEP),
        args: dict[str, Any] | None = None,
        **recipe: Any,
    ) -> DeviceRunner:
        recipe = {"norm": "tracked", "weighting": "equal", **recipe}
        task = replace(make_task(model, args or {}, **recipe), models=models)
        return DeviceRunner(FedIN(task, FedIN.Options(**options or {})), dataset, partition)

    return make


def do_round(
    runner: DeviceRunner, state: State, round_index: int, devices: Sequence[Device] = DEVICES
) -> tuple[State, list[Update]]:
    """Do a round with all devices, or with some."""
    return rounds.do_round(runner, state, round_index, devices)


def run(runner: DeviceRunner, rounds: int = 2, devices: list[Device] = DEVICES) -> State:
    state = runner.method.setup()
    for round_index in range(rounds):
        state, _ = do_round(runner, state, round_index, devices)
    return state


# ---- what is sent and what stays


@pytest.mark.parametrize("rule", ["sum", "projection", "sequential", "none"])
def test_intermediate_layers_never_appear_in_messages(make_runner: MakeRunner, rule: str) -> None:
    runner = make_runner({"rule": rule})
    method, state = runner.method, runner.method.setup()
    for round_index in range(3):
        for device in DEVICES:
            plan = method.plan(state, device, round_index)
            sent = {*method.submodels.view(plan.submodel), *method.payload(state, plan)}
            assert not any(name.startswith("blocks") for name in sent)
        state, updates = do_round(runner, state, round_index)
        for update in updates:
            names = {name.partition(".")[0] for name in update.tensors}
            assert names == {"stem", "head"}
            assert set(update.sample_payload) == (set() if rule == "none" else {EARLY, LATE})
            assert {name.partition(".")[0] for name in update.device_state} == {"blocks"}
        assert {name.partition(".")[0] for name in state.tensors} == {"stem", "head"}
    parameters = {n for n, _ in method.submodels.pattern(method.main).named_parameters()}
    for update in updates:
        own = dict(method.submodels.pattern(update.plan.submodel).named_parameters())
        blocks = {name for name in own if name.startswith("blocks")}
        assert blocks <= update.device_state.keys()
    assert parameters >= set(method.submodels.parameters(state, method.main)) == set(state.tensors)


def test_devices_keep_their_layers_from_round_to_round(make_runner: MakeRunner) -> None:
    runner = make_runner()
    state = run(runner, 1)
    before = state.devices[1]
    model = runner.method.deploy(state)[f"device 1 ({DEEP})"].fill().state_dict()
    for name, tensor in before.items():
        assert torch.equal(model[name], tensor)
    for name, tensor in state.tensors.items():
        assert torch.equal(model[name], tensor)
    assert not torch.equal(
        before["blocks.0.0.weight"], run(runner, 2).devices[1]["blocks.0.0.weight"]
    )


def test_the_server_takes_the_mean_of_the_ends(make_runner: MakeRunner) -> None:
    runner = make_runner()
    state, updates = do_round(runner, runner.method.setup(), 0)
    for name, tensor in state.tensors.items():
        expected = torch.stack([update.tensors[name] for update in updates]).mean(0)
        torch.testing.assert_close(tensor, expected)


def test_an_upgraded_device_begins_its_new_model_afresh(make_runner: MakeRunner) -> None:
    runner = make_runner()
    state = run(runner, 1)
    method: Any = runner.method
    submodel = Architecture(DEEP)
    received = {**state.tensors}
    fresh = method.start(submodel, received, {})
    for device_state in (state.devices[0], {}):  # That of the shallow model does not fit.
        start = method.start(submodel, received, device_state)
        assert all(torch.equal(start[name], fresh[name]) for name in fresh)
    assert not torch.equal(
        method.start(submodel, received, state.devices[1])["blocks.0.0.weight"],
        fresh["blocks.0.0.weight"],
    )


def test_a_device_with_frozen_layers_remembers_the_others(make_runner: MakeRunner) -> None:
    model = "mixed_models:partly_frozen"
    runner = make_runner(model=model, models=(model,))
    state, _ = do_round(runner, runner.method.setup(), 0, [Device(0, "a", model=model)])
    method: Any = runner.method
    start = method.start(Architecture(model), state.tensors, state.devices[0])
    assert not any(name.startswith("blocks.0.") for name in state.devices[0])
    for name, tensor in state.devices[0].items():
        assert torch.equal(start[name], tensor)


# ---- a device's round


def reference(
    runner: DeviceRunner, start: dict[str, Tensor], pairs: tuple[Tensor, Tensor], round_index: int
) -> tuple[nn.Module, list[Tensor]]:
    """Train device 2 as the paper says, in plain torch; return its model and last features."""
    method: Any = runner.method
    recipe, rule, weight = method.task.recipe, method.options.rule, method.options.weight
    model: Any = method.submodels.build(Architecture(DEEP))
    model.load_state_dict(start)
    model.train()
    middle = nn.Sequential(*model.blocks)
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay
    )
    rows = runner.partition.shard(2)
    generator = rng.torch_generator(method.task.seed, "batches", round_index, 2)
    data, last = runner.dataset, []
    for _ in range(recipe.epochs):
        order = rows[torch.randperm(len(rows), generator=generator)]
        for chosen in torch.split(order, recipe.batch):
            images = runner.transform(data.train_inputs[chosen], None)
            early = model.stem(images)
            late = middle(early)
            if len(chosen) == recipe.batch:
                last = [early.detach(), late.detach()]
            losses = [F.cross_entropy(model.head(late), data.train_labels[chosen])]
            parameters = list(model.parameters())
            g = torch.autograd.grad(losses[0], parameters)
            optimizer.zero_grad()
            if rule == "sequential":
                for parameter, gradient in zip(parameters, g, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                optimizer.zero_grad()
            imitated = weight * F.mse_loss(middle(pairs[0]), pairs[1])
            h = torch.autograd.grad(imitated, parameters, allow_unused=True)
            flat = [(a, b) for a, b in zip(h, g, strict=True) if a is not None]
            inner = sum(float((a * b).sum()) for a, b in flat)
            size = sum(float((b * b).sum()) for _, b in flat)
            for parameter, own, other in zip(parameters, g, h, strict=True):
                if rule == "sequential":
                    parameter.grad = other
                elif other is None:
                    parameter.grad = own
                elif rule == "sum":
                    parameter.grad = own + other
                else:
                    parameter.grad = other - min(inner, 0) / size * own
            optimizer.step()
    return model, last


@pytest.mark.parametrize("rule", ["sum", "projection", "sequential"])
def test_a_device_does_what_the_paper_says(make_runner: MakeRunner, rule: str) -> None:
    runner = make_runner({"rule": rule, "weight": 0.7}, epochs=2, weight_decay=1e-3)
    method: Any = runner.method
    state = run(runner, 1)
    plan = method.plan(state, DEVICES[2], 1)
    assert [stage.work.label for stage in plan.stages] == [rule]
    payload = method.payload(state, plan)
    start = dict(method.start(plan.submodel, state.tensors, state.devices[2]))
    model, last = reference(runner, start, (payload[EARLY], payload[LATE]), 1)
    update = runner.train(state, plan)
    assert isinstance(update, Update)
    found = {**update.tensors, **update.device_state}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    torch.testing.assert_close(update.sample_payload[EARLY], last[0])
    torch.testing.assert_close(update.sample_payload[LATE], last[1])
    # 15 samples in batches of 4, twice; a sequential step is two.
    assert update.steps == (16 if rule == "sequential" else 8)


def test_with_nothing_between_the_ends_it_is_fedavg(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    task = make_task("linear", weighting="samples")
    devices = [Device(number, "any") for number in range(3)]
    ours = run(
        DeviceRunner(FedIN(task, FedIN.Options(rule="none")), dataset, partition), 2, devices
    )
    theirs = run(DeviceRunner(FedAvg(task), dataset, partition), 2, devices)
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)


def test_without_aggregation_and_in_training_it_is_local(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", norm="tracked")
    devices = [Device(number, "any") for number in range(3)]
    alone = FedIN(task, FedIN.Options(rule="none", aggregate=False))
    assert alone.discloses == frozenset()
    ours = run(DeviceRunner(alone, dataset, partition), 2, devices)
    theirs = run(DeviceRunner(Local(task), dataset, partition), 2, devices)
    for number in range(3):
        for name, tensor in theirs.devices[number].items():
            assert torch.equal(ours.devices[number][name], tensor)
    scores = LocalEngine(DeviceRunner(alone, dataset, partition)).evaluate(ours)
    others = LocalEngine(DeviceRunner(Local(task), dataset, partition)).evaluate(theirs)
    assert [s.counts for s in scores.values()] == [s.counts for s in others.values()]


# ---- the store


def test_the_first_round_is_local_and_later_ones_get_pairs(make_runner: MakeRunner) -> None:
    runner = make_runner()
    method, state = runner.method, runner.method.setup()
    plan = method.plan(state, DEVICES[0], 0)
    assert [stage.work.label for stage in plan.stages] == ["local"]
    assert method.payload(state, plan) == {}
    state = run(runner, 1)
    plan = method.plan(state, DEVICES[0], 1)
    payload = method.payload(state, plan)
    assert {n: (t.shape, t.dtype) for n, t in payload.items()} == {
        n: (t.shape, t.dtype) for n, t in method.traffic(plan, 5).down.items()
    }
    assert payload[EARLY].shape == (4, 6)
    assert payload[LATE].shape == (4, 5)
    # Nobody else has sent anything: there is nothing to learn from.
    (only,) = [state for state, _ in [do_round(runner, method.setup(), 0, DEVICES[:1])]]
    assert method.plan(only, DEVICES[0], 1).stages[0].work.label == "local"
    assert method.plan(only, DEVICES[1], 1).stages[0].work.label == "sum"


def test_pairs_are_drawn_uniformly_over_the_other_devices(make_runner: MakeRunner) -> None:
    runner = make_runner(batch=64)
    method = runner.method
    server_state = {}
    for number, rows in enumerate((64, 2, 64, 1)):
        # Every number says whose it is and in which row, in both tensors.
        marks = 100.0 * number + torch.arange(rows)
        server_state |= {f"{EARLY}/{number}": marks[:, None].expand(-1, 6)}
        server_state |= {f"{LATE}/{number}": marks[:, None].expand(-1, 5)}
    state = replace(method.setup(), server_state=server_state)
    drawn = []
    for round_index in range(30):
        plan = method.plan(state, DEVICES[0], round_index)
        payload = method.payload(state, plan)
        assert torch.equal(payload[EARLY][:, 0], payload[LATE][:, 0])
        again = method.payload(state, plan)
        assert torch.equal(payload[EARLY], again[EARLY])
        drawn.append(payload[EARLY][:, 0])
    values = torch.cat(drawn)
    assert len(torch.unique(torch.stack(drawn), dim=0)) == 30
    shares = [float((values // 100 == number).float().mean()) for number in range(4)]
    assert shares[0] == 0
    assert shares[1:] == pytest.approx([1 / 3] * 3, abs=0.04)
    assert set(values[values // 100 == 2].tolist()) == {200.0 + row for row in range(64)}


@pytest.mark.parametrize("keep", [1, 2])
def test_the_server_keeps_the_last_uploads_of_each_device(
    make_runner: MakeRunner, keep: int
) -> None:
    runner = make_runner({"keep": keep})
    state, sent = runner.method.setup(), []
    for round_index in range(3):
        state, updates = do_round(runner, state, round_index)
        sent.append(updates[2].sample_payload)
    for name in (EARLY, LATE):
        expected = torch.cat([payload[name] for payload in sent[-keep:]])
        assert torch.equal(state.server_state[f"{name}/2"], expected)
    # A device that is not asked keeps its place.
    later, _ = do_round(runner, state, 3, DEVICES[:1])
    assert torch.equal(later.server_state[f"{EARLY}/2"], state.server_state[f"{EARLY}/2"])


def test_a_server_optimiser_and_the_store_do_not_disturb_each_other(
    make_runner: MakeRunner,
) -> None:
    runner = make_runner(server="fedadam", server_lr=0.01)
    state = run(runner, 3)
    assert {f"{EARLY}/{number}" for number in range(3)} <= state.server_state.keys()
    assert {f"first/{name}" for name in state.tensors} <= state.server_state.keys()


# ---- what comes from devices is checked, and blurred on request


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda told: {EARLY: told[EARLY]}, "'features/out' was asked for and did not come"),
        (lambda told: {**told, "more": told[LATE]}, "'more' was not asked for"),
        (lambda told: {**told, EARLY: told[EARLY][:1]}, "expected torch.float32 of shape"),
        (lambda told: {**told, EARLY: told[EARLY].double()}, "is torch.float64"),
        (lambda told: {**told, LATE: told[LATE] / 0}, "not finite"),
    ],
)
def test_features_that_were_not_asked_for_are_refused(
    make_runner: MakeRunner, damage: Any, reason: str
) -> None:
    runner = make_runner()
    _, (update, *_) = do_round(runner, runner.method.setup(), 0)
    traffic = runner.method.traffic(update.plan, update.samples)
    with pytest.raises(UpdateRefused, match=reason):
        traffic.check(damage(update.sample_payload))


def test_clipping_and_noise_change_what_is_shared_and_nothing_else(make_runner: MakeRunner) -> None:
    _, plain = do_round(make_runner(), make_runner().method.setup(), 0)
    runner = make_runner({"clip": 0.5, "noise": 0.1})
    _, blurred = do_round(runner, runner.method.setup(), 0)
    for one, other in zip(plain, blurred, strict=True):
        assert all(torch.equal(one.tensors[n], other.tensors[n]) for n in one.tensors)
        generator = rng.torch_generator(0, "noise", 0, one.plan.device)
        for name in (EARLY, LATE):
            rows = one.sample_payload[name]
            expected = rows * (0.5 / rows.norm(dim=1).clamp(min=0.5))[:, None]
            expected = expected + 0.1 * torch.randn(rows.shape, generator=generator)
            torch.testing.assert_close(other.sample_payload[name], expected)


def test_what_is_disclosed_follows_the_options(make_runner: MakeRunner) -> None:
    assert make_runner().method.discloses == {"weights", "features"}
    assert "reconstructed" in make_runner().method.caution
    assert make_runner({"rule": "none"}).method.discloses == {"weights"}
    assert make_runner({"rule": "none"}).method.caution == ""
    assert make_runner({"aggregate": False}).method.discloses == {"features"}


# ---- bytes


def needs(runner: DeviceRunner, name: str) -> int:
    method: Any = runner.method
    return int(method.peak(Architecture(name), method.stage(0)))


def test_a_device_gets_the_costliest_model_that_fits_its_bytes(make_runner: MakeRunner) -> None:
    runner = make_runner({"models": (DEEP, SHALLOW)}, models=())
    small, large = needs(runner, SHALLOW), needs(runner, DEEP)
    assert small < large
    state = runner.method.setup()

    def chosen(memory: int | None) -> str:
        return runner.method.plan(state, Device(0, "any", memory), 0).submodel.label

    assert chosen(small) == chosen(large - 1) == SHALLOW
    assert chosen(large) == chosen(None) == DEEP
    with pytest.raises(BudgetTooSmall) as error:
        chosen(small - 1)
    assert error.value.needed == small
    # A model that was named is held to the bytes as well.
    with pytest.raises(BudgetTooSmall):
        runner.method.plan(state, Device(0, "any", small, model=DEEP), 5)


@pytest.mark.parametrize("rule", ["sum", "projection", "sequential", "none"])
@pytest.mark.parametrize("name", [SHALLOW, DEEP])
def test_predicted_bytes_hold_what_a_step_needs(
    make_runner: MakeRunner, rule: str, name: str
) -> None:
    runner = make_runner({"rule": rule}, momentum=0.9)
    state = run(runner, 2)
    device = replace(DEVICES[2], model=name)
    plan = runner.method.plan(state, device, 2)
    update = runner.train(state, replace(plan, budget=plan.predicted))
    assert isinstance(update, Update), update
    assert update.peak_bytes is not None
    assert plan.predicted is not None
    features = 2 * 4 * (6 + 5) * 4
    # Features to be shared are counted for the whole step, and are new in some part of it.
    assert plan.predicted - features <= update.peak_bytes <= plan.predicted
    short = runner.train(state, replace(plan, budget=update.peak_bytes - 1))
    assert "out of budget" in str(short)


def test_bytes_and_flops_of_a_round_are_counted(tmp_path: Path) -> None:
    result, lines = trained(tmp_path)
    first, later = lines[0], lines[3]
    assert first["stages"] == ["local"]
    assert later["stages"] == ["sum"]
    pairs = 8 * (6 + 5) * 4
    ends = (64 * 6 + 6 + 5 * 10 + 10) * 4
    assert (first["bytes_down"], first["bytes_up"]) == (ends, ends + pairs)
    assert (later["bytes_down"], later["bytes_up"]) == (ends + pairs, ends + pairs)
    assert later["flops"] > first["flops"]
    assert result["bytes_up"] == sum(line["bytes_up"] for line in lines)


def test_two_steps_in_turn_cost_what_one_along_both_does(make_runner: MakeRunner) -> None:
    spent = {}
    for rule in ("none", "sum", "sequential"):
        method = make_runner({"rule": rule}).method
        plan = method.plan_upper_bound(method.setup(), DEVICES[0], 1)
        (stage,) = plan.stages
        spent[rule] = method.flops_per_sample(plan.submodel, stage)
    assert spent["none"] < spent["sum"] == spent["sequential"]


def test_the_plan_shows_what_travels_once_there_are_features(tmp_path: Path) -> None:
    rows = {row["group"]: row for row in preview.rows(configs.from_dict(TABLES))}
    pairs = 8 * (6 + 5) * 4
    ends = (64 * 6 + 6 + 5 * 10 + 10) * 4
    assert {row["bytes_down"] for row in rows.values()} == {ends + pairs}
    assert {row["bytes_up"] for row in rows.values()} == {ends + pairs}
    assert [rows[name]["size"] for name in ("weak", DEEP)] == [SHALLOW, DEEP]


# ---- a whole run

TABLES: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": SHALLOW},
    "data": {"train_limit": 90, "test_limit": 40},
    "fleet": {
        "per_round": 3,
        "group": [{"count": 2, "memory": "60kB", "name": "weak"}, {"count": 1, "model": DEEP}],
    },
    "method": {"name": "fedin"},
    "recipe": {"batch": 8, "eval_batch": 20},
}


def trained(path: Path, **tables: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with session.started(configs.from_dict({**TABLES, **tables}), path / "run") as federation:
        result = federation.run()
    lines = (path / "run/updates.jsonl").read_text().splitlines()
    return result, [json.loads(line) for line in lines]


def test_every_device_is_evaluated_with_its_own_model(tmp_path: Path) -> None:
    result, lines = trained(tmp_path)
    names = [f"device 0 ({SHALLOW})", f"device 1 ({SHALLOW})", f"device 2 ({DEEP})"]
    assert list(result["sizes"]) == names
    assert result["accuracy"] == pytest.approx(sum(result["sizes"].values()) / 3)
    assert {line["group"]: line["size"] for line in lines} == {"weak": SHALLOW, DEEP: DEEP}
    assert result["budget_bytes"] == {"weak": 60_000, DEEP: None}


def test_workers_do_not_change_a_bit(tmp_path: Path) -> None:
    one, lines = trained(tmp_path / "one")
    two, others = trained(tmp_path / "two", engine={"workers": 2})
    assert one["state_sha256"] == two["state_sha256"]
    assert one["sizes"] == two["sizes"]
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]


def test_the_command_line_says_what_is_disclosed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text(tomli_w.dumps({**TABLES, "rounds": 1}))
    arguments = ["run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run"), "--json"]
    monkeypatch.setattr("sys.argv", ["sizewise", *arguments])
    with pytest.raises(SystemExit) as exit_code:
        cli.main()
    assert exit_code.value.code in (0, None)
    shown = capsys.readouterr()
    assert "devices disclose: features, weights" in shown.err
    assert "caution: early features of private samples" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["rounds"] == 1


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"method": {"name": "fedin", "models": [SHALLOW, OTHER]}}, "the same stem and head"),
        ({"method": {"name": "fedin", "models": ["mixed_models:none"]}}, "no function or class"),
        ({"method": {"name": "fedavg"}}, "fedavg trains one model on all devices"),
        ({"method": {"name": "fedin", "rule": "some"}}, "method.rule cannot be 'some'"),
        ({"method": {"name": "fedin", "weight": 0.0}}, "method.weight must be positive"),
        ({"method": {"name": "fedin", "keep": 0}}, "method.keep must be at least 1"),
        ({"recipe": {"norm": "per_submodel"}}, "use 'batch', 'sbn' or 'tracked'"),
        ({"model": {"name": SHALLOW, "weights": "w.safetensors"}}, "leave it out"),
    ],
)
def test_what_cannot_be_is_said_before_a_folder_is_made(
    tmp_path: Path, tables: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        trained(tmp_path, **tables)
    assert not (tmp_path / "run").exists()
