"""Data that is given in memory has a name and a hash in its run folder, and nothing replaces it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import assert_one_sentence, sizewise
from sizewise import config
from sizewise.data import memory
from sizewise.data.dataset import Dataset
from sizewise.errors import CheckpointError, DataError
from sizewise.runs import deployment, session

TABLES: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "linear"},
    "fleet": {"devices": 3, "per_round": 2},
    "recipe": {"batch": 4, "augment": "flip"},
}


def start(path: Path, dataset: Dataset, **tables: Any) -> dict[str, Any]:
    with session.started(config.from_dict({**TABLES, **tables}), path, dataset) as federation:
        return federation.run()


@pytest.fixture
def folder(tmp_path: Path, dataset: Dataset) -> Path:
    """A finished run of data in memory."""
    start(tmp_path / "run", dataset)
    return tmp_path / "run"


def others(dataset: Dataset) -> dict[str, Dataset]:
    """Return data sets that differ from another one in a single thing."""
    images, labels = dataset.train_inputs.clone(), dataset.test_labels.clone()
    images[7, 0, 2, 2] += 1
    labels[3] = (labels[3] + 1) % 3
    return {
        "a pixel": replace(dataset, train_inputs=images),
        "a test label": replace(dataset, test_labels=labels),
        "the mean": replace(dataset, mean=(0.31,)),
        "a class": replace(dataset, class_names=("a", "b", "d")),
        "writers": replace(dataset, groups=torch.arange(30)),
    }


def test_the_hash_is_that_of_all_but_the_name(dataset: Dataset) -> None:
    own = memory.identity(dataset)
    assert own == memory.identity(replace(dataset, name="other", metric="accuracy"))
    hashes = {memory.identity(other) for other in others(dataset).values()}
    assert len(hashes - {own}) == len(others(dataset))


def test_hashes_are_what_they_were() -> None:
    # They are kept in run folders and configs: another name of a field must not change them.
    images = torch.arange(8, dtype=torch.uint8).reshape(2, 1, 2, 2)
    labels = torch.tensor([0, 1])
    data = Dataset("tiny", images, labels, images, labels, ("a", "b"), (0.5,), (0.25,))
    assert data.fingerprint().startswith("69bf11b066c3617a238e1adeaacea4d4")
    assert memory.identity(data).startswith("908b88cb55265e6c2909c84e3adf76a4")


def test_every_image_counts_of_large_data_too(dataset: Dataset) -> None:
    many = replace(
        dataset,
        train_inputs=torch.zeros(5000, 1, 1, 1, dtype=torch.uint8),
        train_labels=torch.zeros(5000, dtype=torch.int64),
        test_inputs=torch.zeros(12, 1, 1, 1, dtype=torch.uint8),
    )
    images = many.train_inputs.clone()
    images[1] = 1
    assert memory.identity(many) != memory.identity(replace(many, train_inputs=images))


def test_the_folder_names_the_data(folder: Path, dataset: Dataset) -> None:
    chosen = config.load(folder / "config.toml").data
    assert (chosen.name, chosen.sha256) == ("memory:tiny", memory.identity(dataset))
    assert "digits" not in (folder / "config.toml").read_text()


def test_commands_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.rglob("*"))
    for arguments in (
        ("run", folder / "config.toml", "--out", tmp_path / "again"),
        ("plan", folder / "config.toml"),
        ("resume", folder),
        ("export", folder, "--size", "full"),
        ("flower", "new", tmp_path / "again", folder / "config.toml"),
    ):
        answer = sizewise(*arguments)
        assert_one_sentence(answer, "the data of this run, 'tiny', was given in memory; give it ag")
    assert not (tmp_path / "again").exists()
    assert sorted(folder.rglob("*")) == before
    renamed = ("--set", "data.name=digits", "--out", tmp_path / "again")
    answer = sizewise("run", folder / "config.toml", *renamed)
    assert_one_sentence(answer, "not what this run was started with ('digits', by its data.sha256)")
    assert not (tmp_path / "again").exists()
    assert sizewise("report", folder).code == 0
    assert "on tiny</title>" in (folder / "report.html").read_text()


def test_only_the_same_data_goes_on(folder: Path, dataset: Dataset, tmp_path: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    chosen = config.load(folder / "config.toml")
    for other in others(dataset).values():
        with pytest.raises(CheckpointError, match=r"not what this run was started with.*'tiny'"):
            session.resumed(folder, other).__enter__()
        with pytest.raises(CheckpointError, match="not what this run was started with"):
            deployment.export(folder, tmp_path / "m.safetensors", size="full", dataset=other)
        with pytest.raises(CheckpointError, match="not what this run was started with"):
            session.started(chosen, tmp_path / "again", other).__enter__()
    assert not (tmp_path / "again").exists()
    same = replace(dataset, name="renamed")
    with session.resumed(folder, same) as federation:
        assert federation.run()["state_sha256"] == result["state_sha256"]
    with session.started(chosen, tmp_path / "again", dataset) as federation:
        assert federation.run()["state_sha256"] == result["state_sha256"]
    assert (tmp_path / "again/config.toml").read_text() == (folder / "config.toml").read_text()


def test_a_stopped_run_goes_on_with_its_data(folder: Path, dataset: Dataset) -> None:
    whole = json.loads((folder / "result.json").read_text())["state_sha256"]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    path = folder.with_name("stopped")
    chosen = config.from_dict(TABLES)
    with pytest.raises(KeyboardInterrupt), session.started(chosen, path, dataset) as federation:
        federation.run(stop)
    with session.resumed(path, dataset) as federation:
        assert federation.run()["state_sha256"] == whole


def test_workers_and_images_that_are_augmented_once(dataset: Dataset, tmp_path: Path) -> None:
    recipe = {**TABLES["recipe"], "augment_once": True}
    alone = start(tmp_path / "one", dataset, recipe=recipe)
    pool = start(tmp_path / "two", dataset, recipe=recipe, engine={"workers": 2})
    assert alone["state_sha256"] == pool["state_sha256"]
    out = tmp_path / "m.safetensors"
    assert deployment.export(tmp_path / "one", out, size="full", dataset=dataset)["accuracy"] > 0


def test_sessions_refuse_what_is_no_dataset(folder: Path, dataset: Dataset, tmp_path: Path) -> None:
    images: Any = dataset.train_inputs
    for attempt in (
        lambda: session.started(config.from_dict(TABLES), tmp_path / "new", images).__enter__(),
        lambda: session.resumed(folder, images).__enter__(),
        lambda: deployment.export(folder, tmp_path / "m.onnx", size="full", dataset=images),
    ):
        with pytest.raises(DataError, match=r"takes a sizewise Dataset, and Tensor came"):
            attempt()
    assert not (tmp_path / "new").exists()
