"""Data in files: folders of images, tables of paths and of numbers, single files, owners."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from commands import assert_one_sentence, sizewise
from sizewise.data import files, memory, sources
from sizewise.data.config import DataConfig
from sizewise.data.dataset import Dataset
from sizewise.errors import DataError

N = 30
LABELS = np.arange(N) * 3 // N
"""Class by class, as folders are read."""
IMAGES = np.random.default_rng(0).integers(0, 256, (N, 5, 4, 3), dtype=np.uint8)
NUMBERS = np.random.default_rng(1).normal(size=(N, 3)).round(3)
SOME = range(N)


@pytest.fixture(autouse=True)
def _private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SIZEWISE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def in_memory(*parts: Any, **options: Any) -> Dataset:
    found = memory.understood(parts, options)
    assert isinstance(found, Dataset)
    return found


def write_images(folder: Path, rows: Any = SOME) -> list[Path]:
    paths = [folder / str(LABELS[row]) / f"{row:02}.png" for row in rows]
    for row, path in zip(rows, paths, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(IMAGES[row]).save(path)
    return paths


def write_csv(path: Path, /, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    return path


def write_lines(path: Path, /, **columns: Any) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def paths_of(folder: Path, *, absolute: bool = False) -> list[str]:
    paths = write_images(folder / "images")
    return [str(path if absolute else path.relative_to(folder)) for path in paths]


def structs(folder: Path) -> Path:
    """Images as pandas writes them again: the file does not say that they are images."""
    cells = [{"bytes": path.read_bytes(), "path": None} for path in write_images(folder / "x")]
    pandas.DataFrame({"image": cells, "label": LABELS}).to_parquet(folder / "structs.parquet")
    return folder / "structs.parquet"


def hugging(folder: Path) -> Path:
    columns = {"image": list(map(Image.fromarray, IMAGES)), "label": LABELS}
    datasets.Dataset.from_dict(columns).to_parquet(folder / "mine.parquet")
    return folder / "mine.parquet"


def folder_of(folder: Path) -> Path:
    write_images(folder / "images")
    (folder / "images" / "0" / "notes.txt").write_text("not an image")
    (folder / "images" / "about").mkdir()
    return folder / "images"


def parquet_of_paths(folder: Path) -> Path:
    table = pandas.DataFrame({"path": paths_of(folder), "label": LABELS})
    table.to_parquet(folder / "paths.parquet")
    return folder / "paths.parquet"


PICTURES: dict[str, Callable[[Path], Path]] = {
    "folder": folder_of,
    "parquet": hugging,
    "structs": structs,
    "parquet of paths": parquet_of_paths,
    "csv": lambda f: write_csv(f / "m.csv", path=paths_of(f), label=LABELS),
    "csv, absolute": lambda f: write_csv(f / "m.csv", p=paths_of(f, absolute=True), y=LABELS),
    "jsonl": lambda f: write_lines(f / "m.jsonl", file=paths_of(f), label=LABELS.astype(str)),
    "lists": lambda f: write_lines(f / "m.jsonl", pixels=IMAGES.tolist(), label=LABELS.tolist()),
}


@pytest.mark.parametrize("form", PICTURES)
def test_images_in_files_are_those_in_memory(form: str, tmp_path: Path) -> None:
    place = PICTURES[form](tmp_path)
    found = sources.load(str(place))
    assert memory.identity(found) == memory.identity(in_memory(IMAGES, LABELS))
    assert found.notes == (
        "there was no test set: 0.2 of the samples, 6 of 30, are held out for it",
    )
    again = sources.load(str(place))  # From the cache, where there is one.
    assert (memory.identity(again), again.notes) == (memory.identity(found), found.notes)
    assert found.name == ("images" if form == "folder" else place.stem)


@pytest.mark.parametrize("test", ["test", "val"])
def test_folders_of_images_with_a_test_set(tmp_path: Path, test: str) -> None:
    write_images(tmp_path / "mine" / "train", SOME[::2])
    write_images(tmp_path / "mine" / test, SOME[1::2])
    found = sources.load("mine")
    parts = (IMAGES[::2], LABELS[::2], IMAGES[1::2], LABELS[1::2])
    assert memory.identity(found) == memory.identity(in_memory(*parts))
    assert found.notes == ()


def test_classes_with_numbers_for_names_are_in_their_order(tmp_path: Path) -> None:
    for number in range(12):
        folder = tmp_path / "mine" / str(number)
        folder.mkdir(parents=True)
        for copy in range(2):
            Image.fromarray(IMAGES[number]).save(folder / f"{copy}.png")
    found = sources.load("mine", holdout=0.5)
    assert found.class_names == tuple(map(str, range(12)))
    assert found.train_labels.tolist() == list(range(12))


@pytest.mark.parametrize("form", ["folder", "csv"])
def test_an_image_that_changes_is_noticed(form: str, tmp_path: Path) -> None:
    place = PICTURES[form](tmp_path)
    before = sources.load(str(place))
    assert bool(list((tmp_path / "cache").rglob("*.safetensors"))) == (form == "folder")
    for path in (tmp_path / "images").rglob("*.png"):
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    assert torch.equal(sources.load(str(place)).train_inputs, 255 - before.train_inputs)


def test_tables_of_numbers(tmp_path: Path) -> None:
    columns = dict(zip("abc", NUMBERS.T, strict=True))
    words = np.array(["ant", "bee", "cow"])[LABELS]
    known = in_memory(NUMBERS, words)
    assert known.shape == (3,)
    write_csv(tmp_path / "m.csv", id=SOME, **columns, species=words)
    write_lines(tmp_path / "m.jsonl", **columns, species=words)
    pandas.DataFrame({**columns, "species": words}).to_parquet(tmp_path / "m.parquet")
    for ending in files.ENDINGS:
        found = sources.load(f"m.{ending}", label="species")
        assert memory.identity(found) == memory.identity(known)
    scaled = sources.load("m.csv", label="species", normalise=True)
    assert memory.identity(scaled) == memory.identity(in_memory(NUMBERS, words, normalise=True))


def test_owners_in_a_file_are_devices(tmp_path: Path) -> None:
    owners = np.array(["x", "z", "y"])[np.arange(N) % 3]
    place = write_csv(tmp_path / "m.csv", a=NUMBERS[:, 0], label=LABELS, whose=owners)
    data = DataConfig(str(place), owner="whose")
    assert data.partition == "natural"
    assert DataConfig(str(place)).partition == "iid"
    assert DataConfig(str(place), owner="whose", partition="iid").partition == "iid"
    found = sources.configured(data, None)
    assert (found.divided, found.shape) == (True, (1,))
    assert found.groups is not None
    assert found.groups.bincount().tolist() == [8, 8, 8]


def test_a_run_on_a_table_from_the_command_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owners = np.array(["x", "z", "y"])[np.arange(N) % 3]
    columns = dict(zip("abc", (NUMBERS + LABELS[:, None]).T, strict=True))
    write_csv(tmp_path / "m.csv", **columns, species=LABELS, whose=owners)
    settings = ["data.name=m.csv", "data.label=species", "data.owner=whose", "model.name=mlp"]
    settings += ["fleet.devices=3", "fleet.per_round=3", "rounds=2", "fleet.budgets=[]"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = sizewise("run", *arguments, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "data: there was no test set: 0.2 of the samples, 6 of 30, are held out" in caplog.text
    described = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert described["samples"]["total"] == 24
    assert "held out" in described["notes"][0]
    # A model for images says that these are none.
    cnn = ["--set", "model.name=cnn", "--out", tmp_path / "two"]
    assert_one_sentence(sizewise("run", *arguments, *cnn), "the data holds vectors of 3, as 'mlp'")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: f / "none.csv", r"a single such file at .*none\.csv, where there is no such"),
        (lambda f: write_lines(f / "m.json", a=[1]), r"m\.json, where there is no such thing"),
        (
            lambda f: write_csv(f / "m.csv", p=["a.png"], y=[0]),
            r"there is no image '.*a\.png'",
        ),
        (lambda f: write_csv(f / "m.csv", a=[1, "x"], y=[0, 1]), "holds texts, which need a tok"),
        (
            lambda f: write_csv(f / "m.csv", a=[1, ""], y=[0, 1]),
            "row 2 has no number in column",
        ),
        (lambda f: write_csv(f / "m.csv", a=[1, 2], y=[0, ""]), "row 2 has no label; fill it in"),
        (lambda f: write_csv(f / "m.csv", a=[1], b=[2]), r"only a, b; say which one .*data\.label"),
    ],
)
def test_files_that_cannot_be_used(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        sources.load(str(make(tmp_path)))
    assert "\n" not in str(caught.value)
