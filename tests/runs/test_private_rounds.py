"""Private runs: what is expected, what is spent, what comes again after a stop, who is refused."""

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sizewise import config as configs
from sizewise import deployment
from sizewise.errors import CheckpointError, ConfigError
from sizewise.exchange.plan import Plan, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut, grid
from sizewise.fleet.devices import FleetConfig, GroupConfig
from sizewise.fleet.making import make_fleet
from sizewise.privacy.accounting import epsilon
from sizewise.privacy.config import PrivacyConfig
from sizewise.runs import session
from sizewise.runs.ledger import FILE, Ledger, Release
from sizewise.runs.preparation import Setting, prepare
from sizewise.runs.private_rounds import KEY, Clipping, PrivateRounds, everyone, expected

TABLES: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "mlp", "args": {"hidden": [12, 8]}},
    "data": {"train_limit": 200, "test_limit": 50},
    "fleet": {"devices": 20, "per_round": 8, "ratios": [0.5, 1.0]},
    "method": {"name": "heterofl"},
    "recipe": {"eval_every": 3},
    "privacy": {"noise": 1.0, "delta": 1e-3, "seed": 5},
}


def tables(**changes: Any) -> dict[str, Any]:
    """Return the tables with some changed; what is a table gets further keys."""
    both = {
        name: {**TABLES.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return {**TABLES, **both}


def setting(**changes: Any) -> Setting:
    return prepare(configs.from_dict(tables(**changes)))


def run(path: Path, **changes: Any) -> dict[str, Any]:
    with session.started(configs.from_dict(tables(**changes)), path) as federation:
        return federation.run()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- what is expected


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("heterofl", {}),
        ("heterofl", {"mask_labels": True}),
        ("fjord", {}),
        ("fedrolex", {}),
        ("feddropout", {}),
        ("splitmix", {}),
    ],
)
def test_expected_weights_are_those_of_counting_every_entry(name: str, more: Any) -> None:
    found = setting(method={"name": name, **more})
    method, fleet, state = found.method, found.fleet, found.start
    counts = {name: torch.zeros(tensor.shape) for name, tensor in state.tensors.items()}
    for device in everyone(fleet, 2):
        plan = method.plan(state, device, 2)
        view = method.submodels.view(plan.submodel)
        for place in view.values():
            at = ... if place.index is None else grid(place.index, counts[place.name].shape)
            counts[place.name][at] += 8 / 20
    there = expected(method, fleet, state, 2)
    assert there.devices == pytest.approx(8.0)
    for name, count in counts.items():
        weight = torch.as_tensor(there.weights.get(name, 0.0))
        assert torch.allclose(weight.expand(count.shape).float(), count), name


def test_devices_that_cannot_take_part_are_not_expected() -> None:
    found = setting(fleet={"ratios": (), "budgets": ["1kB", "2MB"]}, method={"name": "fedavg"})
    there = expected(found.method, found.fleet, found.start, 0)
    assert there.devices == pytest.approx(4.0)
    assert list(there.weights.values()) == [pytest.approx(4.0)] * len(found.start.tensors)


def test_a_plan_does_not_depend_on_who_else_is_asked() -> None:
    # SplitMix deals its bases by turn: of all who were there, not of those who were drawn.
    found = setting(method={"name": "splitmix"})
    for round_index in range(3):
        listed = {d.id: d for d in everyone(found.fleet, round_index)}
        for seed in range(3):
            for device in found.fleet.sample(seed, round_index):
                assert device == listed[device.id]


# ---- the merge of a whole method


def merged(found: Setting, folder: Path, present: set[int], **privacy: Any) -> State:
    """Return the state after a round in which some devices send a huge update."""
    config = replace(PrivacyConfig(noise=1e-6, seed=0), **privacy)
    method, state = found.method, found.start
    folder.mkdir(exist_ok=True)
    rounds = PrivateRounds(config, method, found.fleet, folder)

    def update(plan: Plan) -> Update:
        view = method.submodels.view(plan.submodel)
        generator = torch.Generator().manual_seed(plan.device)
        tensors = {
            name: tensor + 50 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in cut(state.tensors, view).items()
        }
        return Update(plan, tensors, samples=1 + plan.device, steps=1, loss=1.0)

    plans = [method.plan(state, device, 0) for device in everyone(found.fleet, 0)]
    return rounds.merge(state, (update(p) for p in plans if p.device in present), 0)


@pytest.mark.parametrize("name", ["alllarge", "heterofl", "feddropout", "splitmix"])
def test_a_device_moves_the_weighted_state_by_the_clip(name: str, tmp_path: Path) -> None:
    found = setting(method={"name": name}, recipe={"server": "fedavg", "server_lr": 1.0})
    everybody = set(range(20))
    weights = expected(found.method, found.fleet, found.start, 0).weights
    with_it = merged(found, tmp_path / "with", everybody, clip=0.5).tensors
    without = merged(found, tmp_path / "without", everybody - {19}, clip=0.5).tensors
    moved = [
        (with_it[n].double() - without[n].double()) * torch.as_tensor(w).clamp(min=1.0)
        for n, w in weights.items()
    ]
    total = torch.cat([tensor.flatten() for tensor in moved]).norm()
    assert float(total) == pytest.approx(0.5, rel=1e-3)  # Rounded to float32.


def test_nobody_came_and_noise_is_added_all_the_same(tmp_path: Path) -> None:
    found = setting()
    state = merged(found, tmp_path, set(), noise=1.0)
    assert all(
        not torch.equal(tensor, found.start.tensors[name])
        for name, tensor in state.tensors.items()
        if not name.endswith("num_batches_tracked")
    )
    assert len(lines(tmp_path / FILE)) == 1


# ---- runs


def test_a_private_run_says_what_it_spent_everywhere(tmp_path: Path) -> None:
    result = run(tmp_path / "run", privacy={"quantile": 0.5})
    spent = epsilon({(0.4, 1.0): 3}, 1e-3, "pld")
    assert result["privacy"]["epsilon"] == pytest.approx(spent)
    assert result["privacy"]["delta"] == 1e-3
    assert result["privacy"]["classes"].keys() == {"0.5 model", "1 model"}
    history = [line["privacy"] for line in lines(tmp_path / "run" / "history.jsonl")]
    epsilons = [line["epsilon"]["1 model"] for line in history]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == pytest.approx(spent)
    assert len({line["next_clip"] for line in history}) == 3
    deployment.export(tmp_path / "run", tmp_path / "model.safetensors", size="full")
    card = (tmp_path / "model.md").read_text()
    assert f"**epsilon {spent:.4g}, delta 0.001**" in card
    assert "a simulation" in card


def test_a_target_gives_the_noise_and_the_run_keeps_it(tmp_path: Path) -> None:
    target = {"epsilon": 4.0, "noise": None}
    result = run(tmp_path, privacy=target)
    assert 3.95 < result["privacy"]["epsilon"] <= 4.0
    kept = configs.load(tmp_path / "config.toml").privacy
    assert kept is not None
    assert kept.noise == result["privacy"]["noise"]
    with (
        pytest.raises(ConfigError, match="9 rounds with a noise of"),
        session.resumed(tmp_path, overrides=["rounds=9"]),
    ):
        pass
    assert (tmp_path / "result.json").exists()  # The folder is as it was.


def test_too_little_noise_on_the_quantile_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"give more than 0\.5"):
        run(tmp_path / "run", privacy={"quantile": 0.5, "quantile_noise": 0.1})
    assert not (tmp_path / "run").exists()


class Stop(Exception):
    """What ends a run in a test."""


@pytest.mark.parametrize("seed", [5, None])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, seed: int | None) -> None:
    chosen = configs.from_dict(tables(privacy={"seed": seed, "quantile": 0.3}))
    with session.started(chosen, tmp_path / "whole") as federation:
        key = tmp_path / "whole" / KEY
        if seed is None:
            assert stat.S_IMODE(key.stat().st_mode) == 0o600
        whole = federation.run()

    def stop(line: Any, totals: Any) -> None:
        if line["round"] == 2:
            raise Stop

    with session.started(chosen, tmp_path / "parts") as federation:
        pass
    if seed is None:
        (tmp_path / "parts" / KEY).write_bytes(key.read_bytes())
    with pytest.raises(Stop), session.resumed(tmp_path / "parts") as federation:
        federation.run(stop)
    # As if the crash had come before the second round was durable.
    for path in (tmp_path / "parts" / "checkpoints").glob("*2.safetensors"):
        path.unlink()
    with session.resumed(tmp_path / "parts") as federation:
        parts = federation.run()
    assert parts["state_sha256"] == whole["state_sha256"]
    assert parts["privacy"] == whole["privacy"]
    assert (tmp_path / "parts" / FILE).read_text() == (tmp_path / "whole" / FILE).read_text()


def test_secret_noise_is_another_in_every_run(tmp_path: Path) -> None:
    hashes = {run(tmp_path / name, privacy={"seed": None})["state_sha256"] for name in "ab"}
    assert len(hashes) == 2


def test_a_lost_key_is_said_in_one_sentence(tmp_path: Path) -> None:
    run(tmp_path, privacy={"seed": None})
    (tmp_path / KEY).unlink()
    with (
        pytest.raises(CheckpointError, match="gone or damaged"),
        session.resumed(tmp_path, overrides=["rounds=4"]),
    ):
        pass
    # What was spent is known without it.
    deployment.export(tmp_path, tmp_path / "model.safetensors", size="full")


def test_a_round_done_again_with_other_devices_counts_twice(tmp_path: Path) -> None:
    found = setting()
    for present in ({1, 2}, {1, 2}, {1, 3}):
        merged(found, tmp_path, present, noise=1.0)
    ledger = Ledger(PrivacyConfig(noise=1.0, delta=1e-3), found.fleet, tmp_path)
    assert [release.round for release in ledger.releases] == [0, 0]
    assert ledger.spent("pld")["1 model"] == pytest.approx(epsilon({(0.4, 1.0): 2}, 1e-3))


def test_classes_spend_by_their_rates_and_by_the_rounds_they_are_there(tmp_path: Path) -> None:
    groups = (GroupConfig(10, 100, "often", rate=0.5), GroupConfig(10, 200, "as all"))
    event = {"event": [{"round": 3, "join": 20, "memory": "300"}]}
    fleet = make_fleet(
        replace(
            FleetConfig(devices=20, per_round=4, group=groups, sampling="poisson"),
            event=configs.from_dict({"fleet": event}).fleet.event,
        ),
        lambda ratio: 0,
    )
    ledger = Ledger(PrivacyConfig(noise=1.5), fleet, tmp_path)
    for number in range(4):
        ledger.note(Release(number, 1.5, str(number)))
    spent = ledger.spent("rdp")
    assert spent == {
        "often": epsilon({(0.5, 1.5): 4}, 1e-5, "rdp"),
        "as all": epsilon({(0.2, 1.5): 2, (0.1, 1.5): 2}, 1e-5, "rdp"),
        "300B": epsilon({(0.1, 1.5): 2}, 1e-5, "rdp"),
    }


def test_statistics_of_norms_are_clipped_with_the_rest(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        model={"name": "cnn", "args": {"layers": [4]}},
        recipe={"norm": "tracked", "eval_every": 3},
        rounds=2,
    )
    assert result["accuracy"] is not None
    state, _ = session.RunFolder(tmp_path).newest() or (None, None)
    assert state is not None
    assert state.facts(Clipping).clip == 1.0
    variances = [t for name, t in state.tensors.items() if name.endswith("running_var")]
    assert variances
    assert all(bool((variance >= 0).all()) for variance in variances)
    counts = [t for name, t in state.tensors.items() if name.endswith("num_batches_tracked")]
    assert all(isinstance(count, Tensor) and int(count) == 0 for count in counts)


# ---- what cannot hold


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": {"weighting": "samples"}}, r"recipe\.weighting = 'equal'"),
        ({"fleet": {"sampling": "fixed"}}, r"fleet\.sampling = 'poisson'"),
        ({"data": {"validation": 0.2}}, r"leave out data\.validation"),
        ({"recipe": {"norm": "sbn"}}, "use 'batch'"),
        ({"engine": {"flower": {"enough": 3}}}, r"leave out engine\.flower\.enough"),
        ({"recipe": {"weighting": "equal", "merge": "median"}}, "'median' has no bound"),
        ({"fleet": {"attack": [{"kind": "noise", "share": 0.2}]}}, "leave one of both out"),
        ({"privacy": {"noise": None}}, r"needs privacy\.epsilon"),
        ({"privacy": {"noise": 0.0}}, "must be a positive number"),
        ({"privacy": {"noise": 1e-9}}, "at least 1e-6"),
        ({"privacy": {"delta": 1.0}}, "between 0 and 1"),
        ({"privacy": {"quantile_noise": 1.0}}, r"set privacy\.quantile"),
    ],
)
def test_what_tells_more_than_noise_covers_is_refused(changes: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        configs.from_dict(tables(**changes))


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("fedin", {}, "share features"),
        ("fedin", {"rule": "none"}, "models that devices keep"),
        ("fedgkt", {"client": "cnn"}, "features, logits and labels"),
        ("local", {}, "models that devices keep"),
        ("inclusivefl", {}, "weighs sizes by the devices that came"),
        ("depthfl", {}, r"set method\.feddyn = false"),
        ("slt", {}, "its merge may use more"),
    ],
)
def test_methods_whose_merge_is_more_than_a_sum_are_refused(
    name: str, more: Any, reason: str
) -> None:
    model = {"name": "preresnet8" if name == "inclusivefl" else "fedin_b", "args": {}}
    with pytest.raises(ConfigError, match=f"cannot hold with {name}: .*{reason}"):
        setting(method={"name": name, **more}, model=model, fleet={"ratios": ()})


@pytest.mark.parametrize(
    ("name", "more"),
    [("fedepth", {}), ("nefl", {}), ("depthfl", {"feddyn": False}), ("fedadam", {})],
)
def test_other_methods_run(name: str, more: Any, tmp_path: Path) -> None:
    result = run(
        tmp_path,
        rounds=1,
        method={"name": name, **more},
        model={"name": "preresnet8", "args": {}},
        fleet={"devices": 8, "per_round": 3, "ratios": ()},
        recipe={"max_steps": 1, "eval_every": 1},
    )
    assert result["privacy"]["releases"] == 1
