"""Whatever people have in Python: the same content is the same data, anything else one sentence."""

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from sizewise.data import memory
from sizewise.data.dataset import Dataset
from sizewise.errors import ConfigError, DataError

N = 60
IMAGES = np.random.default_rng(0).integers(0, 256, (N, 3, 8, 6), dtype=np.uint8)
LAST = IMAGES.transpose(0, 2, 3, 1)
"""Channels last."""
LABELS = np.arange(N) % 3
WORDS = np.array(["ant", "bee", "cow"])[LABELS]
PICTURES = [Image.fromarray(image) for image in LAST]


class Listed:
    """A map-style data set that does not even say that it is one."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(IMAGES, LABELS, strict=True)


def taken(data: Any, **options: Any) -> Dataset:
    found = memory.understood(data, options)
    assert isinstance(found, Dataset)
    return found


def pairs(inputs: Any, labels: Any = LABELS) -> Listed:
    return Listed(list(zip(inputs, labels, strict=True)))


def png(picture: Image.Image) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def hugging(inputs: Any = PICTURES, **more: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"image": inputs, "label": LABELS, **more})


def frame(inputs: Any = LAST, **more: Any) -> pandas.DataFrame:
    return pandas.DataFrame({"image": list(inputs), "label": LABELS, **more})


def cubes() -> datasets.Dataset:
    kinds = {"x": datasets.Array3D((3, 8, 6), "uint8"), "y": datasets.Value("int64")}
    return datasets.Dataset.from_dict(
        {"x": list(IMAGES), "y": LABELS}, features=datasets.Features(kinds)
    )


TENSORS = TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
LABEL = TENSORS.tensors[1]
FIRST, REST = Subset(TENSORS, range(9)), Subset(TENSORS, range(9, N))
BASE = (IMAGES, LABELS)
ALIKE: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
    "channels last": lambda: (LAST, LABELS),
    "whole numbers of another type": lambda: (IMAGES.astype(np.int64), LABELS.astype(np.int8)),
    "read-only": lambda: (np.frombuffer(IMAGES.tobytes(), np.uint8).reshape(IMAGES.shape), LABELS),
    "labels one-hot": lambda: (IMAGES, np.eye(3)[LABELS]),
    "labels in a column": lambda: (IMAGES, LABELS[:, None]),
    "labels as floats": lambda: (IMAGES, LABELS.astype(np.float32)),
    "labels as words": lambda: (IMAGES, LABELS.astype(str)),
    "labels in a list": lambda: (IMAGES, LABELS.tolist()),
    "labels in a series": lambda: (IMAGES, pandas.Series(LABELS)),
    "pictures": lambda: pairs(PICTURES, LABELS.tolist()),
    "arrays one by one": lambda: pairs(LAST),
    "tensors one by one": lambda: pairs(torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
    "one-hot one by one": lambda: pairs(IMAGES, torch.eye(3)[LABELS]),
    "list of samples": lambda: list(zip(PICTURES, LABELS.tolist(), strict=True)),
    "list of rows": lambda: [{"img": p, "target": int(y)} for p, y in zip(PICTURES, LABELS)],  # noqa: B905
    "dicts": lambda: Listed([{"x": i, "label": y} for i, y in TENSORS]),
    "columns": lambda: {"image": IMAGES, "label": LABELS},
    "TensorDataset": lambda: TENSORS,
    "Subset of tensors": lambda: Subset(TENSORS, range(N)),
    "Subset": lambda: Subset(pairs(PICTURES), range(N)),
    "ConcatDataset": lambda: ConcatDataset([FIRST, REST]),
    "DataLoader": lambda: DataLoader(TENSORS, batch_size=7, shuffle=True),
    "Hugging Face": hugging,
    "Hugging Face as torch": lambda: hugging().with_format("torch"),
    "Hugging Face cubes": cubes,
    "Hugging Face cubes as torch": lambda: Listed(list(cubes().with_format("torch"))),
    "frame": frame,
    "frame of pictures": lambda: frame(PICTURES),
    "frame of files": lambda: frame([png(picture) for picture in PICTURES]),
    "frame of parquet's structs": lambda: frame([{"bytes": png(p)} for p in PICTURES]),
    "objects in an array": lambda: (pandas.Series(PICTURES).to_numpy(), LABELS),
    "frame and series": lambda: (frame()[["image"]], frame()["label"]),
    "frame with an index": lambda: frame().set_index(np.arange(N)[::-1]).reset_index(),
}


@pytest.mark.parametrize("form", ALIKE)
def test_the_same_content_is_the_same_data(form: str) -> None:
    assert memory.identity(taken(ALIKE[form]())) == memory.identity(taken(BASE))


def test_a_share_is_held_out_and_the_run_says_so() -> None:
    data = taken(BASE)
    assert (len(data.train_labels), len(data.test_labels)) == (48, 12)
    assert data.test_labels.bincount().tolist() == [4, 4, 4]
    assert data.notes == (
        "there was no test set: 0.2 of the samples, 12 of 60, are held out for it",
    )
    assert len(taken(BASE, holdout=0.5).test_labels) == 30
    with pytest.raises(DataError, match=r"tensors has no test set, and data\.holdout is 0"):
        taken(BASE, holdout=0.0)
    with pytest.raises(ConfigError, match=r"data\.holdout must lie between 0 and 1, got 1.5"):
        taken(BASE, holdout=1.5)


@pytest.mark.parametrize(
    "form",
    [
        lambda: (IMAGES[:40], LABELS[:40], IMAGES[40:], LABELS[40:]),
        lambda: ((IMAGES[:40], LABELS[:40]), (IMAGES[40:], LABELS[40:])),
        lambda: (Subset(TENSORS, range(40)), Subset(pairs(PICTURES), range(40, N))),
        lambda: (frame()[:40], frame()[40:]),
        lambda: {"train": hugging().select(range(40)), "validation": TENSORS[40:]},
        lambda: datasets.DatasetDict(
            train=hugging().select(range(40)), test=hugging().select(range(40, N))
        ),
        lambda: datasets.DatasetDict(train=cubes().select(range(40)), test=cubes().skip(40)),
    ],
)
def test_training_and_test_data(form: Callable[[], Any]) -> None:
    data = taken(form())
    assert torch.equal(data.train_inputs, torch.from_numpy(IMAGES[:40]))
    assert data.train_labels.tolist() == LABELS[:40].tolist()
    # Of mixed classes, for norms that look at a batch.
    assert data.test_labels.tolist() != LABELS[40:].tolist()
    assert memory.identity(data) == memory.identity(
        taken((IMAGES[:40], LABELS[:40], IMAGES[40:], LABELS[40:]))
    )
    assert not any("held out" in note for note in data.notes)


def test_words_are_classes_in_order() -> None:
    for data in (taken((IMAGES, WORDS)), taken(frame(kind=WORDS), label="kind")):
        assert data.class_names == ("ant", "bee", "cow")
        assert data.train_labels.tolist() == taken(BASE).train_labels.tolist()
    many = np.array([str(label) for label in np.arange(N) % 12])
    assert taken((IMAGES, many)).class_names == tuple(map(str, range(12)))
    truth = taken((IMAGES, LABELS == 0))
    assert truth.class_names == ("false", "true")
    # A word has the number that it has in the training data.
    data = taken(((IMAGES, WORDS), (IMAGES[:2], np.array(["cow", "bee"]))))
    assert sorted(data.test_labels.tolist()) == [1, 2]
    with pytest.raises(DataError, match=r"test: no training sample has the label 'elk'"):
        taken(((IMAGES, WORDS), (IMAGES[:1], np.array(["elk"]))))


def test_grey_images_need_no_channel() -> None:
    grey = IMAGES[:, 0]
    as_grey = [picture.convert("L") for picture in map(Image.fromarray, grey)]
    for data in (taken((grey, LABELS)), taken(pairs(as_grey)), taken(frame(grey))):
        assert data.shape == (1, 8, 6)
        assert torch.equal(data.train_inputs[:2, 0], taken((grey, LABELS)).train_inputs[:2, 0])
    mixed = taken(pairs([as_grey[0], *PICTURES[1:]]))
    assert mixed.shape == (3, 8, 6)


def test_floats_are_taken_as_they_are_unless_asked() -> None:
    floats = IMAGES.astype(np.float64) / 255
    data = taken((floats, LABELS))
    assert data.train_inputs.dtype == torch.float32
    assert (data.mean, data.std) == ((), ())
    seen = data.transform()(data.test_inputs, None)
    assert torch.equal(seen, data.test_inputs)
    assert seen.data_ptr() != data.test_inputs.data_ptr()  # A model may work in place.
    assert any("float inputs are taken as they are, with mean " in note for note in data.notes)
    for policy in ("flip", "crop-flip", "crop-flip-cutout"):
        moved = data.transform(policy)(data.train_inputs, torch.Generator())
        assert moved.shape == data.train_inputs.shape
    asked = taken((floats, LABELS), normalise=True)
    seen = asked.transform()(asked.train_inputs, None)
    assert seen.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-5)
    # As bytes are normalised, always.
    assert torch.allclose(seen, taken(BASE).transform()(taken(BASE).train_inputs, None), atol=1e-4)


def test_tables_of_numbers_are_vectors() -> None:
    rows = np.random.default_rng(1).normal(3, 2, (N, 4))
    table = pandas.DataFrame(rows, columns=list("abcd")).assign(species=WORDS, id=range(N))
    data = taken(table, label="species", normalise=True)
    assert (data.shape, data.class_names) == ((4,), ("ant", "bee", "cow"))
    assert len(data.mean) == 4
    seen = data.transform()(data.train_inputs, None)
    assert seen.std(0, correction=0).tolist() == pytest.approx([1] * 4, rel=1e-4)
    arrays = taken((rows.astype(np.float32), WORDS), normalise=True)
    assert memory.identity(arrays) == memory.identity(data)
    with pytest.raises(ConfigError, match=r"augment = 'flip' is for images, and tensors holds vec"):
        arrays.transform("flip")


def test_one_data_set_per_device() -> None:
    shares = [range(0, 10), range(10, 35), range(35, N)]
    owners = np.repeat([0, 1, 2], [10, 25, 25])
    parts = [Subset(TENSORS, share) for share in shares]
    found = taken(parts)
    assert found.divided
    assert found.groups is not None
    assert found.groups.bincount().tolist() == [8, 20, 20]  # A fifth of each is for tests.
    assert memory.implied(found) == {
        "data": {"partition": "natural"},
        "fleet": {"devices": 3, "per_round": 3},
    }
    same = memory.identity(found)
    assert memory.identity(taken({2: parts[2], 0: parts[0], 1: parts[1]})) == same
    assert memory.identity(taken(dict(zip("yxz", parts, strict=True)))) == same
    assert memory.identity(taken((*BASE, owners))) == same
    assert memory.identity(taken(frame(whose=owners), owner="whose")) == same
    words = np.array(["a", "b", "c"])[owners]
    assert memory.identity(taken(hugging(whose=words), owner="whose")) == same
    tested = taken((parts, TENSORS))
    assert tested.groups is not None
    assert tested.groups.bincount().tolist() == [10, 25, 25]
    own = taken([(part, part) for part in parts])
    assert (len(own.train_labels), len(own.test_labels)) == (N, N)


def test_words_of_devices_have_one_number() -> None:
    data = taken([(IMAGES[:4], WORDS[:4]), (IMAGES[4:6], WORDS[4:6]), (IMAGES[:2], WORDS[[2, 2]])])
    assert data.class_names == ("ant", "bee", "cow")
    assert data.groups is not None
    assert set(data.train_labels[data.groups == 2].tolist()) == {2}


def test_what_is_read_one_by_one_says_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    data = taken(DataLoader(pairs(PICTURES), batch_size=7))
    assert data.notes[:2] == (
        "Listed was read once, 60 samples, 8.64 kB in memory; what its transforms draw at random "
        "stays as drawn",
        "of the DataLoader its data set is taken, not its batch size, 7",
    )
    assert capsys.readouterr().err == ""  # The bar is for terminals.


def test_a_bar_follows_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    taken(pairs(PICTURES))
    assert "reading Listed" in capsys.readouterr().err


def test_options_say_how_data_is_read() -> None:
    sizes = [picture.resize((8 + i % 2, 8)) for i, picture in enumerate(PICTURES)]
    with pytest.raises(DataError, match=r"different sizes.*data\.image_size"):
        taken(pairs(sizes))
    data = taken(pairs(sizes), image_size=4, train_limit=7, test_limit=5)
    assert data.shape == (3, 4, 4)
    assert (len(data.train_labels), len(data.test_labels)) == (7, 5)
    assert taken((IMAGES, LABELS), image_size=4).shape == (3, 4, 4)
    with pytest.raises(ConfigError, match=r"data\.image_size is for images of bytes"):
        taken((IMAGES / 255, LABELS), image_size=4)
    for option in ({"label": "y"}, {"owner": "y"}, {"holdout": 0.1}, {"normalise": True}):
        with pytest.raises(ConfigError, match="says how samples become a Dataset, and a Dataset c"):
            memory.understood(data, option)


def with_nan(values: Any) -> Any:
    broken = np.array(values, dtype=np.float64)
    broken[3] = np.nan
    return broken


def raising(number: int) -> Any:
    raise ValueError("no such file\nand more")


class Broken(Listed):
    def __getitem__(self, number: int) -> Any:
        return raising(number)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "iterable-style": (Endless, "Endless is iterable-style: its samples have no numbers; collect"),
    "loader of such": (lambda: DataLoader(Endless()), "Endless is iterable-style"),
    "generator": (lambda: (pair for pair in TENSORS), "generator is iterable-style"),
    "no length": (lambda: type("Odd", (), {"__getitem__": raising})(), "Odd does not say how many"),
    "empty": (lambda: Listed([]), "Listed has no samples"),
    "empty list": (list, "an empty list"),
    "raises": (
        lambda: Broken([1]),
        r"sample 0 cannot be read \(ValueError: no such file\); ch",
    ),
    "unlabelled": (lambda: Listed(PICTURES), "a sample is a pair .*; sample 0 is a Image: wrap it"),
    "unlabelled tensors": (lambda: TensorDataset(torch.zeros(3, 2)), "sample 0 is a tuple of 1"),
    "three parts": (lambda: TensorDataset(*TENSORS.tensors, LABEL), "sample 0 is a tuple of 3"),
    "lists": (lambda: pairs([[IMAGES[0], LABELS]] * N), "some are lists of arrays of different l"),
    "shapes": (
        lambda: pairs([IMAGES[0], *IMAGES[1:, :, 1:]]),
        "samples of different sizes, such",
    ),
    "types": (lambda: pairs([IMAGES[0], *IMAGES[1:] / 255]), "uint8 and of torch.float32; convert"),
    "mixed labels": (lambda: (IMAGES, [*LABELS[1:], "cow"]), "of one kind, and int64 and str came"),
    "missing label": (lambda: (IMAGES, [*WORDS[1:], None]), "row 60 has no label"),
    "label is NaN": (lambda: (IMAGES, with_nan(LABELS)), "row 4 has no label"),
    "scores": (lambda: (IMAGES, LABELS / 2), "labels are classes, and 0.5 is none"),
    "soft labels": (lambda: (IMAGES, np.full((N, 3), 1 / 3)), "one-hot rows, and some row is not"),
    "several labels": (lambda: pairs(IMAGES, [[0]] * 59 + [[0, 1]]), "one label a sample"),
    "identifiers": (lambda: (IMAGES, LABELS * 1000), "labels up to 2,000; number the classes"),
    "counts": (lambda: (IMAGES, LABELS[1:]), "has 60 inputs and 59 labels; give one for each"),
    "owners": (lambda: (*BASE, LABELS[1:]), "has 60 inputs and 59 owners"),
    "five arrays": (lambda: (*BASE, *BASE, LABELS), "a tuple of arrays is .*; 5 came"),
    "scikit-learn's order": (
        lambda: (IMAGES, IMAGES, LABELS, LABELS),
        "in this order, and the ",
    ),
    "NaN": (lambda: (with_nan(IMAGES), LABELS), "row 4 has nan among its values; fill in"),
    "token ids": (
        lambda: (np.ones((N, 9), np.int64), LABELS),
        "features or token ids; int64",
    ),
    "deep": (
        lambda: (IMAGES.astype(np.int32) * 9, LABELS),
        "bytes, 0 to 255, and 0 to 2295 c",
    ),
    "video": (lambda: (IMAGES[:, None], LABELS), r"inputs are images .*; uint8 \(60, 1, 3, 8, 6\)"),
    "true and false": (lambda: (IMAGES > 9, LABELS), "inputs are uint8 or floats; bool"),
    "objects": (lambda: (np.array([set()] * N), LABELS), "has a label, and no column of images"),
    "16 bits": (lambda: pairs([p.convert("I") for p in PICTURES]), "more than 8 bits"),
    "sampler": (
        lambda: DataLoader(TENSORS, sampler=SubsetRandomSampler(range(9))),
        "this one's sampler chooses samples, which would be lost; give the data set, or",
    ),
    "collate": (lambda: DataLoader(TENSORS, collate_fn=list), "collate_fn would be lost"),
    "no label column": (
        lambda: frame().drop(columns="label"),
        "no label column .*, only image;",
    ),
    "no inputs": (lambda: frame()[["label"]], "has a label, and no column of images, paths"),
    "no picture": (lambda: frame([*PICTURES[1:], None]), "row 60 holds NoneType in place of an im"),
    "no file": (lambda: frame(["nowhere.png"] * N), "there is no image 'nowhere.png'; correct"),
    "no image": (lambda: frame([b"text"] * N), "the image cannot be read"),
    "texts": (
        lambda: (["a text"] * N, LABELS.tolist()),
        "holds texts, which need a token",
    ),
    "some tests": (lambda: [(TENSORS, TENSORS), TENSORS], "1 of 2 devices have a test set; give"),
    "other devices": (lambda: [TENSORS, (IMAGES[:, :, 1:], LABELS)], "different sizes"),
    "other test data": (lambda: (TENSORS, (IMAGES / 255, LABELS)), "are torch.uint8, test inputs"),
    "streams of unknown columns": (
        lambda: datasets.IterableDataset.from_generator(lambda: iter([{"x": 1}])),
        "does not know its columns; give a datasets.Dataset",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_anything_else_is_one_sentence(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(DataError, match=message) as caught:
        memory.understood(make())
    assert "\n" not in str(caught.value)


def test_columns_that_are_named_have_to_be_there() -> None:
    with pytest.raises(DataError, match=r"no column 'lable', as data\.label says; did you mean"):
        taken(frame(), label="lable")
    table = frame(whose=[*WORDS[1:], None])
    with pytest.raises(DataError, match=r"some are missing; correct the column of data\.owner"):
        taken(table, owner="whose")
    numbers = pandas.DataFrame({"a": with_nan(LABELS), "b": LABELS, "label": LABELS})
    with pytest.raises(DataError, match="row 4 has no number in column 'a'; fill it in, or drop"):
        taken(numbers)


def test_paths_are_names_of_files(tmp_path: Path) -> None:
    assert memory.understood(tmp_path / "mine.csv") == str(tmp_path / "mine.csv")
    assert memory.understood("owner/name") == "owner/name"


def test_a_large_data_set_takes_one_copy_and_no_time() -> None:
    images = torch.zeros(60_000, 3, 32, 32, dtype=torch.uint8)
    labels = torch.arange(60_000) % 10
    data = taken((images, labels, images[:10], labels[:10]))
    assert data.train_inputs.data_ptr() == images.data_ptr()
