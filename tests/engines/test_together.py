"""Devices that train in one batched call learn what each would learn alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sizewise import config as configs
from sizewise.data.dataset import Dataset
from sizewise.engines import together
from sizewise.errors import ConfigError
from sizewise.runs import preparation, session
from sizewise.runs.federation import Federation

TABLES: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "mlp", "args": {"hidden": [8]}},
    "data": {"partition": "iid", "train_limit": 240, "test_limit": 60},
    "fleet": {"devices": 12, "per_round": 8},
    "recipe": {"batch": 8, "epochs": 2, "lr": 0.1},
}


def run(
    path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch, **tables: Any
) -> tuple[Any, int]:
    """Return the result of a run with its final tensors, and how many devices trained at once."""
    calls = watched(monkeypatch)
    config = configs.from_dict({**TABLES, **tables})
    config = replace(config, engine=replace(config.engine, together=at_once))
    with session.started(config, path) as federation:
        result = federation.run()
        return (result, final(federation)), sum(map(len, calls))


def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the devices that train in each batched call from now on."""
    calls: list[list[int]] = []
    fit = together.fit

    def counted(*given: Any) -> Any:
        updates = fit(*given)
        calls.append([update.plan.device for update in updates])
        return updates

    monkeypatch.setattr(together, "fit", counted)
    return calls


def final(federation: Federation) -> dict[str, torch.Tensor]:
    found = federation.folder.newest()
    assert found is not None
    return dict(found[0].tensors)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"method": {"name": "fedprox"}},
        {"recipe": {**TABLES["recipe"], "optimizer": "adam", "lr": 0.01, "weight_decay": 0.01}},
        {"recipe": {**TABLES["recipe"], "batch": 7, "momentum": 0.9, "max_steps": 5}},
        {"model": {"name": "cnn", "args": {"layers": [4]}}},
        {"model": {"name": "linear"}, "engine": {"workers": 2}},
    ],
    ids=["fedavg", "proximal", "adam", "uneven batches", "convolutions", "workers"],
)
def test_same_results_within_rounding(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected, alone), none = run(tmp_path / "alone", 0, monkeypatch, **tables)
    (result, batched), count = run(tmp_path / "batched", 4, monkeypatch, **tables)
    assert none == 0
    # The very first device is metered, and so is alone; workers count for themselves.
    assert count > 12 or "engine" in tables
    # Those of one call took the same time, to the last digit, also in a worker.
    lines = (tmp_path / "batched/updates.jsonl").read_text().splitlines()
    times = [json.loads(line)["seconds"] for line in lines]
    assert len(set(times)) < 0.7 * len(times)
    for name, tensor in alone.items():
        torch.testing.assert_close(batched[name], tensor, rtol=1e-4, atol=1e-5)
    for key in ("rounds", "bytes_up", "bytes_down", "flops", "peak_bytes", "refused"):
        assert result[key] == expected[key]
    assert result["accuracy"] == pytest.approx(expected["accuracy"], abs=0.02)


@pytest.mark.parametrize(
    "tables",
    [
        {"recipe": {**TABLES["recipe"], "clip": 1.0}},
        {"recipe": {**TABLES["recipe"], "augment": "crop-flip"}},
        {
            "model": {"name": "cnn", "args": {"layers": [4]}},
            "recipe": {**TABLES["recipe"], "norm": "tracked"},
        },
        {"model": {"name": "vit", "args": {"depth": 1, "dim": 16, "heads": 2, "dropout": 0.1}}},
        {"method": {"name": "heterofl"}},
        {"engine": {"enforce": True}},
    ],
    ids=["clipped", "augmented", "buffers", "dropout", "own loss", "enforced"],
)
def test_what_cannot_be_batched_trains_alone_with_the_same_bits(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {**tables, "rounds": 2}
    (expected, _), _ = run(tmp_path / "alone", 0, monkeypatch, **tables)
    (result, _), count = run(tmp_path / "batched", 4, monkeypatch, **tables)
    assert count == 0
    assert result["state_sha256"] == expected["state_sha256"]


def test_a_device_that_diverges_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of eight has bright images and overflows; the seven that see black ones do not notice."""
    images = torch.zeros(80, 1, 2, 2, dtype=torch.uint8)
    labels = torch.arange(80) % 2
    tables = {
        **TABLES,
        "rounds": 2,
        "model": {"name": "linear"},
        "data": {"partition": "iid"},
        "fleet": {"devices": 8, "per_round": 8},
        "recipe": {"batch": 5, "epochs": 1, "lr": 1e30, "momentum": 0.0, "weight_decay": 0.0},
    }
    config = configs.from_dict(tables)
    dark = Dataset("dark", images, labels, images, labels, ("a", "b"), (0.0,), (1e-5,))
    bright = preparation.prepare(config, dark).partition.shard(5)
    images[bright] = 255
    results = {}
    for at_once in (0, 4):
        calls = watched(monkeypatch)
        chosen = replace(config, engine=replace(config.engine, together=at_once))
        with session.started(chosen, tmp_path / str(at_once), dark) as federation:
            results[at_once] = federation.run(), final(federation)
        # The bright one was in a batch with others.
        assert any(5 in call and len(call) == 4 for call in calls) == (at_once == 4)
    for result, _ in results.values():
        (refused,) = result["refused"]
        assert (refused["devices"], refused["times"]) == ([5], 2)
        assert "lower recipe.lr" in refused["reason"]
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[4][1][name], tensor)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.together must not be negative"):
        configs.from_dict({"engine": {"together": -1}})
