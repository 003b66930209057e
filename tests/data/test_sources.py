"""Loading: bundled digits, parquet folders (real and made up), the hub (replaced), the cache."""

import os
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sizewise.data import cache, sources
from sizewise.data.decode import channel_statistics, resize
from sizewise.errors import ConfigError, DataError

NAMES = ["cat", "dog", "owl"]
REPOSITORY = Path(__file__).parents[2]
# Read here, because every test starts without the variable.
REAL_DATA = Path(os.environ.get("SIZEWISE_DATA") or REPOSITORY.parent / "shared" / "data")


@pytest.fixture(autouse=True)
def _private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SIZEWISE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a switch after which only the cache can be read."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the source was read again")

    return lambda: monkeypatch.setattr(datasets, "load_dataset", fail)


def shared_data(name: str) -> Path:
    """Return a folder of real data, or skip the test."""
    if not (REAL_DATA / name).is_dir():
        pytest.skip(f"{REAL_DATA / name} is not there; set SIZEWISE_DATA to where the data is")
    return REAL_DATA / name


def picture(value: int, mode: str = "RGB", size: tuple[int, int] = (4, 4)) -> Image.Image:
    width, height = size
    ramp = np.arange(width * height, dtype=np.uint8).reshape(height, width) + value
    return Image.fromarray(ramp).convert(mode)


def split(
    count: int = 6, *, label: str = "label", pictures: list[Image.Image] | None = None, **more: Any
) -> datasets.Dataset:
    """Return a small data set as the hub gives them; ``more`` adds string columns."""
    pictures = pictures or [picture(10 * i) for i in range(count)]
    columns = {"img": pictures, label: [i % 3 for i in range(len(pictures))], **more}
    kinds = {"img": datasets.Image(), label: datasets.ClassLabel(names=NAMES)}
    kinds |= {key: datasets.Value("string") for key in more}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def folder(path: Path, **splits: datasets.Dataset) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in splits.items():
        pq.write_table(data.with_format("arrow")[:], path / f"{name}-00000-of-00001.parquet")
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, datasets.DatasetDict]:
    """Replace the hub by a dictionary."""
    shelf: dict[str, datasets.DatasetDict] = {}

    def load_dataset(
        path: str, config: str | None = None, *, streaming: bool
    ) -> datasets.DatasetDict:
        assert streaming
        return shelf[path]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("sizewise.data.hub.reachable", lambda: True)
    return shelf


# Digits


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data = sources.load("digits")
    assert data.shape == (1, 8, 8)
    assert (len(data.train_labels), len(data.test_labels), data.classes) == (1437, 360, 10)
    theirs = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    ours = torch.cat([data.train_inputs, data.test_inputs]).squeeze(1).numpy()
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs))
    assert data.train_labels.bincount().min() >= 139
    assert data.test_labels.bincount().min() >= 34
    assert data.train_inputs.is_contiguous()


def test_digits_do_without_the_bundled_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources.load("digits")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    after = sources.load("digits")
    assert torch.equal(before.train_inputs, after.train_inputs)
    assert torch.equal(before.test_labels, after.test_labels)


def test_listing_names_imports_nothing_heavy() -> None:
    code = "import sys, sizewise.data; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b"[]"


# Real data


def test_cifar10_tiny_is_decoded_exactly(no_reading: Callable[[], None]) -> None:
    path = shared_data("cifar10-tiny")
    data = sources.load(str(path))
    assert data.name == "cifar10-tiny"
    assert data.train_inputs.shape == (2000, 3, 32, 32)
    assert data.test_inputs.shape == (1000, 3, 32, 32)
    assert data.class_names[:2] == ("airplane", "automobile")
    assert data.train_labels.bincount().tolist() == [200] * 10
    rows = pq.read_table(next(path.glob("train-*.parquet"))).slice(1990).to_pylist()
    for row, image, label in zip(
        rows, data.train_inputs[1990:], data.train_labels[1990:].tolist(), strict=True
    ):
        pixels = np.asarray(Image.open(BytesIO(row["img"]["bytes"])))
        assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)
        assert label == row["label"]
    # Batches of the test set hold mixed classes.
    assert min(len(batch.unique()) for batch in data.test_labels.view(10, 100)) == 10

    no_reading()
    again = sources.load(str(path))
    for field in ("train_inputs", "train_labels", "test_inputs", "test_labels"):
        assert torch.equal(getattr(again, field), getattr(data, field))
    assert (again.class_names, again.mean, again.std) == (data.class_names, data.mean, data.std)


def test_femnist_knows_its_writers(tmp_path: Path) -> None:
    path = shared_data("femnist")
    small = tmp_path / "femnist"
    small.mkdir()
    writers: list[str] = []
    for file in path.glob("*.parquet"):
        rows = pq.ParquetFile(file).read_row_group(0)
        pq.write_table(rows, small / file.name)
        writers = rows["writer_id"].to_pylist() if file.name.startswith("train") else writers
    data = sources.load("femnist", str(tmp_path))
    assert data.shape == (1, 28, 28)
    assert data.classes == 62
    assert data.groups is not None
    names = sorted(set(writers))
    assert [names[group] for group in data.groups.tolist()] == writers


# Folders and the hub


def test_where_a_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "root" / "cifar10", train=split(), validation=split(3))
    monkeypatch.chdir(tmp_path)
    by_root = sources.load("cifar10", str(tmp_path / "root"))
    by_path = sources.load("root/cifar10")
    monkeypatch.setenv("SIZEWISE_DATA", str(tmp_path / "root"))
    by_variable = sources.load("cifar10")
    for data in (by_root, by_path, by_variable):
        assert data.name == "cifar10"
        assert len(data.test_labels) == 3
        assert data.std == (0.2023, 0.1994, 0.2010)  # what the papers use, not what is measured


def test_hub_by_name_and_by_id(
    hub: dict[str, datasets.DatasetDict], no_reading: Callable[[], None]
) -> None:
    hub["zh-plus/tiny-imagenet"] = datasets.DatasetDict(train=split(9), valid=split(3))
    hub["some/owls"] = datasets.DatasetDict(train=split(5), test=split(4))
    assert len(sources.load("tiny_imagenet").train_labels) == 9
    data = sources.load("some/owls")
    assert data.class_names == tuple(NAMES)
    assert data.train_labels.tolist() == [0, 1, 2, 0, 1]
    assert sorted(data.test_labels.tolist()) == [0, 0, 1, 2]
    no_reading()
    assert torch.equal(sources.load("some/owls").train_inputs, data.train_inputs)


def test_hub_femnist_holds_out_a_tenth(hub: dict[str, datasets.DatasetDict]) -> None:
    writers = [f"w{i % 4}" for i in range(40)]
    pictures = [picture(i, "L") for i in range(40)]
    rows = split(label="character", pictures=pictures, writer_id=writers)
    hub["flwrlabs/femnist"] = datasets.DatasetDict(train=rows)
    data = sources.load("femnist")
    assert (len(data.train_labels), len(data.test_labels)) == (36, 4)
    assert data.groups is not None
    numbers = data.train_inputs[:, 0, 0, 0]  # the first pixel is the picture's number
    assert torch.equal(data.groups, numbers.long() % 4)


def test_fine_labels_are_the_default(hub: dict[str, datasets.DatasetDict]) -> None:
    rows = split(label="fine_label")
    rows = rows.add_column("coarse_label", [0] * 6).cast_column(
        "coarse_label", datasets.ClassLabel(names=["all"])
    )
    columns = ["img", "coarse_label", "fine_label"]
    hub["uoft-cs/cifar100"] = datasets.DatasetDict(
        train=rows.select_columns(columns), test=rows.select_columns(columns)
    )
    assert sources.load("cifar100").class_names == tuple(NAMES)


def test_integer_labels_will_do(tmp_path: Path) -> None:
    plain = split().cast_column("label", datasets.Value("int64"))
    data = sources.load(str(folder(tmp_path / "plain", train=plain, test=plain)))
    assert data.class_names == ("0", "1", "2")


def test_grey_among_colour_becomes_colour(tmp_path: Path) -> None:
    mixed = split(pictures=[picture(0, "L"), picture(1, "RGB"), picture(2, "L")])
    path = folder(tmp_path / "mixed", train=mixed, test=split(pictures=[picture(0, "L")]))
    data = sources.load(str(path))
    assert data.train_inputs.shape == (3, 3, 4, 4)
    assert data.test_inputs.shape == (1, 3, 4, 4)
    assert data.train_inputs[2, :, 0, 0].tolist() == [2, 2, 2]
    assert data.test_inputs.is_contiguous()


def test_mixed_sizes_need_an_image_size(tmp_path: Path) -> None:
    pictures = [picture(0), picture(0, size=(8, 4)), picture(0, size=(5, 7))]
    path = folder(tmp_path / "mixed", train=split(pictures=pictures), test=split(2))
    with pytest.raises(DataError, match=r"different sizes.*data\.image_size"):
        sources.load(str(path))
    assert sources.load(str(path), image_size=4).shape == (3, 4, 4)


def test_limits_are_fixed_samples(tmp_path: Path) -> None:
    pictures = [picture(i, "L") for i in range(60)]
    path = str(folder(tmp_path / "some", train=split(pictures=pictures), test=split(20)))
    full = sources.load(path)
    data = sources.load(path, train_limit=12, test_limit=5)
    numbers = data.train_inputs[:, 0, 0, 0].tolist()
    assert len(set(numbers)) == 12
    assert numbers == sorted(numbers)  # still in the order of the data set
    assert numbers != list(range(12))
    assert torch.equal(data.test_labels, full.test_labels[:5])
    assert data.mean == full.mean
    assert len(sources.load(path, train_limit=1000).train_labels) == 60
    with pytest.raises(ConfigError, match=r"data\.test_limit must be at least 1, got 0"):
        sources.load(path, test_limit=0)


# The cache


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: bytes | None) -> None:
    path = str(folder(tmp_path / "some", train=split(), test=split(3)))
    data = sources.load(path)
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    intact = file.read_bytes()
    # Written anew, not in place: the loaded tensors are mapped from the old file.
    file.unlink()
    file.write_bytes(intact[:-5] if damage is None else damage)
    assert torch.equal(sources.load(path).train_inputs, data.train_inputs)
    assert file.read_bytes() == intact
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_changed_files_are_decoded_again(tmp_path: Path) -> None:
    path = folder(tmp_path / "some", train=split(6), test=split(3))
    assert len(sources.load(str(path)).train_labels) == 6
    folder(path, train=split(9))
    assert len(sources.load(str(path)).train_labels) == 9


def test_an_unwritable_cache_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SIZEWISE_CACHE", str(tmp_path / "file"))
    path = folder(tmp_path / "some", train=split(), test=split(3))
    assert len(sources.load(str(path)).train_labels) == 6
    assert "cannot be written" in caplog.text


def test_a_stored_data_set_of_another_shape_is_not_used(tmp_path: Path) -> None:
    data = sources.load("digits")
    cache.write(tmp_path / "d.safetensors", data)
    assert cache.read(tmp_path / "d.safetensors") is not None
    object.__setattr__(data, "class_names", ("only one",))
    cache.write(tmp_path / "d.safetensors", data)
    assert cache.read(tmp_path / "d.safetensors") is None


# Errors


def bad_split(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": split(1)}, "too few to hold some out"),
        ({"train": bad_split(size=[1]), "test": split()}, "no label column"),
        ({"train": bad_split(label=[1]), "test": split()}, "no column of images, paths of images"),
        ({"train": split().select_columns(["img"]), "test": split()}, "no label column"),
        ({"train": split(), "test": split(label="other")}, "could not be read"),
        ({"train": split(), "test": split(pictures=[picture(0, size=(5, 5))])}, "image_size"),
        ({"train": split(pictures=[picture(0, "I")]), "test": split()}, "more than 8 bits"),
    ],
)
def test_unusable_folders(
    tmp_path: Path, splits: dict[str, datasets.Dataset], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        sources.load(str(folder(tmp_path / "bad", **splits)))
    assert "\n" not in str(caught.value)


def test_damaged_parquet(tmp_path: Path) -> None:
    path = folder(tmp_path / "bad", train=split(), test=split())
    (path / "train-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"bad could not be read .*; check or replace its files"):
        sources.load(str(path))


def test_hidden_labels(tmp_path: Path) -> None:
    hidden = split().map(lambda _: {"label": -1})
    with pytest.raises(DataError, match=r"test labels must lie in 0\.\.2, got -1\.\.-1"):
        sources.load(str(folder(tmp_path / "bad", train=split(), test=hidden)))


def test_names_that_mean_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"did you mean 'cifar10'.*SIZEWISE_DATA or data\.root"):
        sources.load("cifar11")
    for path in ("/nowhere/at/all", "./nothing"):
        with pytest.raises(DataError, match=r"expected a folder with train-\*\.parquet"):
            sources.load(path)
    with pytest.raises(DataError, match=r"data\.root must be a folder"):
        sources.load("cifar10", str(tmp_path / "missing"))


def test_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach it\nand a page of detail")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr("sizewise.data.hub.reachable", lambda: True)
    with pytest.raises(DataError, match=r"ConnectionError: Couldn't reach it\); .*data\.root") as e:
        sources.load("cifar10")
    assert "\n" not in str(e.value)
    assert e.value.__suppress_context__


# Pixels


def test_resize_by_a_whole_factor_averages_blocks() -> None:
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    blocks = images.double().view(5, 3, 4, 2, 4, 2).mean((3, 5))
    assert torch.equal(resize(images, 4), blocks.round().to(torch.uint8))
    assert resize(images, 8) is images


@pytest.mark.parametrize("size", [3, 5, 16])
def test_resize_keeps_a_flat_image_flat(size: int) -> None:
    flat = torch.full((2, 1, 8, 6), 200, dtype=torch.uint8)
    resized = resize(flat, size)
    assert torch.equal(resized, torch.full((2, 1, size, size), 200, dtype=torch.uint8))
    assert resized.is_contiguous()


def test_channel_statistics_are_exact() -> None:
    images = torch.randint(256, (7, 3, 5, 5), dtype=torch.uint8)
    mean, std = channel_statistics(images)
    pixels = images.double().transpose(0, 1).flatten(1) / 255
    assert mean == pytest.approx(pixels.mean(1).tolist())
    assert std == pytest.approx(pixels.std(1, correction=0).tolist())
    assert channel_statistics(torch.zeros(2, 1, 3, 3, dtype=torch.uint8)) == ((0.0,), (1.0,))
