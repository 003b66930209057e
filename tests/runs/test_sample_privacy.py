"""Runs with gradients clipped sample by sample: their bytes, their epsilon, and who is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise import deployment
from sizewise.errors import ConfigError
from sizewise.privacy.accounting import epsilon
from sizewise.runs import session
from sizewise.runs.preparation import prepare

TABLES: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "mlp", "args": {"hidden": [12, 8]}},
    "data": {"train_limit": 96, "test_limit": 40},
    "fleet": {"devices": 4, "per_round": 2, "ratios": [0.5, 1.0]},
    "method": {"name": "heterofl"},
    "recipe": {"batch": 8, "sample_clip": 1.0, "sample_noise": 1.0, "sample_seed": 0, "epochs": 3},
    "engine": {"enforce": True},
}


def run(path: Path, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    both = {n: {**TABLES.get(n, {}), **v} if isinstance(v, dict) else v for n, v in changes.items()}
    with session.started(configs.from_dict({**TABLES, **both}), path) as federation:
        result = federation.run()
    lines = (path / "updates.jsonl").read_text().splitlines()
    return result, [json.loads(line) for line in lines]


VIT = {"name": "vit", "args": {"depth": 2, "dim": 16}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recipe": {"optimizer": "adam", "proximal": 0.1}},
        {"method": {"name": "splitmix"}},
        {"method": {"name": "fedepth"}, "model": VIT, "fleet": {"ratios": [0.8, 1.0]}},
        {"model": VIT, "method": {"name": "fedavg"}, "fleet": {"ratios": [0.98]}},
    ],
)
def test_predicted_bytes_are_those_of_the_meter(changes: dict[str, Any], tmp_path: Path) -> None:
    more = {"levers": "auto"} if changes.get("method") == {"name": "fedavg"} else {}
    changes = {**changes, "recipe": {"epochs": 1, **changes.get("recipe", {}), **more}}
    _, lines = run(tmp_path, rounds=1, **changes)
    assert [line["predicted"] for line in lines] == [line["peak_bytes"] for line in lines]
    assert all(line["predicted"] <= line["budget"] for line in lines)


def test_a_device_spends_one_release_for_each_pass(tmp_path: Path) -> None:
    result, lines = run(tmp_path)
    asked: dict[str, dict[int, int]] = {}
    for line in lines:
        counts = asked.setdefault(line["group"], {})
        counts[line["device"]] = counts.get(line["device"], 0) + 3
    spent = result["sample_privacy"]
    assert spent["passes"] == {group: max(counts.values()) for group, counts in asked.items()}
    assert spent["epsilon"] == {
        group: pytest.approx(epsilon({(1.0, 1.0): passes}, 1e-5))
        for group, passes in spent["passes"].items()
    }
    assert spent["repeatable"]
    history = [json.loads(text) for text in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert history[-1]["sample_privacy"] == spent
    deployment.export(tmp_path, tmp_path / "model.safetensors", size="full")
    assert "**epsilon of a sample, by device class:" in (tmp_path / "model.md").read_text()


def test_losses_stay_on_devices(tmp_path: Path) -> None:
    _, lines = run(tmp_path, rounds=1)
    assert {line["loss"] for line in lines} == {0.0}


def test_simulated_noise_repeats_and_secret_noise_does_not(tmp_path: Path) -> None:
    seeded = [run(tmp_path / name, rounds=1)[0]["state_sha256"] for name in "ab"]
    assert seeded[0] == seeded[1]
    secret = {"recipe": {"sample_seed": None}}
    drawn = [run(tmp_path / name, rounds=1, **secret)[0]["state_sha256"] for name in "cd"]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("method", "model", "reason"),
    [
        ({"name": "heterofl", "mask_labels": True}, {}, r"set method\.mask_labels = false"),
        ({"name": "splitmix", "mask_labels": True}, {}, "depends on its batch"),
        ({"name": "fedavg"}, {"name": "preresnet8", "args": {}}, "batch norms mix samples"),
        ({"name": "fedin"}, {"name": "fedin_b", "args": {}}, "send features of their samples"),
    ],
)
def test_what_tells_more_of_samples_is_refused(method: Any, model: Any, reason: str) -> None:
    tables = {**TABLES, "method": method, "model": {**TABLES["model"], **model}}
    with pytest.raises(ConfigError, match=f"cannot hold with {method['name']}: .*{reason}"):
        prepare(configs.from_dict(tables))
