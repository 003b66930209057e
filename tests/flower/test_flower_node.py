"""A node: what it tells, what it measures, what it trains on."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sizewise import config as configs
from sizewise.data.dataset import Dataset
from sizewise.errors import ConfigError, DataError

pytest.importorskip("flwr")

import subprocess

from fake_grid import FakeGrid
from flwr.app import Context, RecordDict

from sizewise.flower import usage
from sizewise.flower.node import (
    Node,
    budget_of,
    device_of,
)
from sizewise.flower.own_data import like_the_others
from sizewise.flower.server import serve


def context(**settings: Any) -> Context:
    named = {name.replace("_", "-"): value for name, value in settings.items()}
    return Context(1, 1, named, RecordDict(), {})


def test_who_it_is() -> None:
    assert device_of(context(partition_id=3)) == 3
    for wrong in ({}, {"partition_id": -1}, {"partition_id": "3"}, {"partition_id": True}):
        with pytest.raises(ConfigError, match="partition-id"):
            device_of(context(**wrong))


def test_what_it_has() -> None:
    assert budget_of(context(memory="20MB")) == 20_000_000
    assert budget_of(context(memory=5000)) == 5000
    assert budget_of(context()) is None
    assert 1_000_000 < (budget_of(context(memory="free")) or 0) < 2**50
    with pytest.raises(ConfigError, match="a node's memory must be"):
        budget_of(context(memory="much"))


def test_what_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "available", lambda root: usage.RESERVE + 1000)
    assert budget_of(context(memory="free")) == 1000
    assert budget_of(context(memory=1000)) == 1000
    with pytest.raises(ConfigError, match=r"48,001,000 are left here; .* 500 bytes more"):
        budget_of(context(memory=1500))
    monkeypatch.setattr(usage, "available", lambda root: usage.RESERVE - 9)
    with pytest.raises(ConfigError, match="memory='free' needs 48,000,001 bytes"):
        budget_of(context(memory="free"))


def test_a_plan_that_no_longer_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "available", lambda root: usage.RESERVE + 1000)
    plan, here = {"device": 1, "predicted": 800}, context(partition_id=1, memory=900)
    Node()._check(plan, 50, here)
    with pytest.raises(ConfigError, match="need 1,004 bytes, and it has no more than 1,000 now"):
        Node()._check(plan, 51, here)
    Node()._check(plan, 51, context(partition_id=1))  # Nobody said what it has.


def test_telling_its_budget_does_not_import_torch() -> None:
    code = "import sizewise.flower.node, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def write_images(folder: Path, split: str, labels: list[int], side: int = 8) -> None:
    """Write square pictures as a parquet file that knows which column holds images."""
    generator, pictures = np.random.default_rng(len(labels)), []
    for label in labels:
        pixels = generator.integers(0, 60, (side, side), dtype=np.uint8)
        pixels[label % 8] += 190
        pictures.append(Image.fromarray(pixels))
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    data = datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(data.with_format("arrow")[:], folder / f"{split}-0.parquet")


def config_of() -> configs.Config:
    return configs.from_dict(
        {
            "rounds": 1,
            "model": {"name": "linear"},
            "data": {"train_limit": 60, "test_limit": 20},
            "fleet": {"devices": 2, "per_round": 2},
            "recipe": {"batch": 8},
            "engine": {"flower": {"wait": 5.0}},
        }
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZEWISE_CACHE", str(tmp_path / "cache"))


def updates(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "updates.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("share", "samples"), [(0.0, (30, 25)), (0.2, (24, 20))])
def test_a_folder_of_its_own(share: float, samples: tuple[int, int], tmp_path: Path) -> None:
    """A node takes what it validates on from its own data, as it does from its share."""
    config = config_of()
    config = replace(config, data=replace(config.data, validation=share))
    write_images(tmp_path / "own", "train", [0, 1, 2, 3, 4] * 5)
    write_images(tmp_path / "own", "test", [0, 1])
    grid = FakeGrid([{"partition-id": 0}, {"partition-id": 1, "data": str(tmp_path / "own")}])
    serve(grid, config, tmp_path / "run", poll=0.01)
    shared, own = updates(tmp_path / "run")
    assert (shared["samples"], own["samples"]) == samples
    assert own["refused"] is None


@pytest.mark.parametrize("form", ["folder", "csv"])
def test_pictures_of_its_own(form: str, tmp_path: Path) -> None:
    lines = ["path,label"]
    for number in range(25):
        path = tmp_path / "own" / str(number % 5) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number, dtype=np.uint8)).save(path)
        lines.append(f"{path.relative_to(tmp_path)},{number % 5}")
    (tmp_path / "own.csv").write_text("\n".join(lines))
    place = tmp_path / ("own" if form == "folder" else "own.csv")
    grid = FakeGrid([{"partition-id": 0}, {"partition-id": 1, "data": str(place)}])
    serve(grid, config_of(), tmp_path / "run", poll=0.01)
    _, own = updates(tmp_path / "run")
    # A fifth of them is held out for tests.
    assert (own["refused"], own["samples"]) == (None, 20)


@pytest.mark.parametrize(
    ("labels", "side", "reason"),
    [
        (12, 8, "its data has 12 classes, and the run has 10"),
        (3, 9, "its inputs are torch.uint8 (1, 9, 9), and those of the run torch.uint8 (1, 8, 8)"),
    ],
)
def test_a_folder_of_another_kind_is_refused(
    labels: int, side: int, reason: str, tmp_path: Path
) -> None:
    write_images(tmp_path / "own", "train", list(range(labels)), side)
    write_images(tmp_path / "own", "test", [0, 1], side)
    grid = FakeGrid([{"partition-id": 0}, {"partition-id": 1, "data": str(tmp_path / "own")}])
    serve(grid, config_of(), tmp_path / "run", poll=0.01)
    assert reason in updates(tmp_path / "run")[1]["refused"]


def test_its_own_labels_are_numbered_as_the_runs(dataset: Dataset) -> None:
    own = replace(
        dataset, class_names=("good", "ugly", "vile"), train_labels=dataset.train_labels % 2
    )
    facts: dict[str, Any] = {"shape": [1, 4, 4], "mean": [0.5], "std": [0.1]}
    facts |= {"dtype": "torch.uint8", "tokenizer": ""}
    found = like_the_others(own, class_names=["bad", "good", "ugly", "vile"], **facts)
    assert torch.equal(found.train_labels, own.train_labels + 1)
    assert torch.equal(found.test_labels, own.test_labels + 1)
    with pytest.raises(DataError, match="has the class 'vile'"):
        like_the_others(own, class_names=["bad", "good", "ugly"], **facts)
    with pytest.raises(DataError, match="its tokenizer is another one than the run's"):
        like_the_others(own, class_names=["a"], **{**facts, "tokenizer": "of another content"})


def test_it_trains_on_one_thread(tmp_path: Path) -> None:
    torch.set_num_threads(3)
    try:
        serve(FakeGrid([{"partition-id": 0}, {"partition-id": 1}]), config_of(), tmp_path / "run")
        assert torch.get_num_threads() == 3, "the server gives back what it found"
        runner = Node()._runner({"config": config_of().to_dict(), "data": {}}, context())
        assert (len(runner.partition), torch.get_num_threads()) == (2, 1)
    finally:
        torch.set_num_threads(1)
