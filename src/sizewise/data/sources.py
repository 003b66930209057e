"""Load a data set by name: bundled digits, a folder of files, or the Hugging Face hub.

Parquet and the hub are read as a stream, so ``datasets`` writes no Arrow copy of its own; what is
kept on disk, once, are the decoded bytes (see ``cache``).
"""

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sizewise.common import rng
from sizewise.common.structure import nearest
from sizewise.data import cache, files
from sizewise.data.catalog import DATASETS, Source
from sizewise.data.dataset import Dataset
from sizewise.data.decode import Split, channel_statistics, decode, resize
from sizewise.data.silos import join
from sizewise.data.texts import encode, find_columns, tokenizer, tokenizer_file
from sizewise.errors import ConfigError, DataError, SizewiseError

__all__ = ["Dataset", "load"]

log = logging.getLogger(__name__)


def load(
    name: str,
    root: str | None = None,
    *,
    train_limit: int | None = None,
    test_limit: int | None = None,
    image_size: int | None = None,
    tokenizer: str | None = None,
    max_tokens: int = 128,
    metric: str | None = None,
    silos: Sequence[str] = (),
) -> Dataset:
    """Load a data set into memory.

    The test set comes in a fixed random order, because evaluation with batch statistics needs
    batches of mixed classes; the training set keeps its order, which some partitions depend on.
    A limit keeps the same random samples every time.

    A folder has ``train-*.parquet`` and ``test-*.parquet`` (or ``validation-*``; of texts also CSV
    and JSON lines, see ``files``). All arguments are keys of ``DataConfig``, which describes them.

    Raises:
        DataError: If the data set cannot be found or read.
        ConfigError: If a limit or the size is below 1.
    """
    for option, value in (
        ("train_limit", train_limit),
        ("test_limit", test_limit),
        ("image_size", image_size),
        ("max_tokens", max_tokens),
    ):
        if value is not None and value < 1:
            raise ConfigError(
                f"data.{option} must be at least 1, got {value}; leave it out for all"
            )
    reading = Reading(image_size, tokenizer, max_tokens)
    parts = [
        _digits(image_size) if each == "digits" else _stored(each, root, reading)
        for each in (name, *silos)
    ]
    full = join(parts) if silos else parts[0]
    known = DATASETS.get(full.name, Source(""))
    train = _sample(len(full.train_labels), train_limit, "train-limit").sort().values
    test = _sample(len(full.test_labels), test_limit, "test-order")
    return dataclasses.replace(
        full,
        # Indexing would copy all images out of the memory map that worker processes share.
        train_inputs=full.train_inputs if train_limit is None else full.train_inputs[train],
        train_labels=full.train_labels[train],
        test_inputs=full.test_inputs[test],
        test_labels=full.test_labels[test],
        groups=None if full.groups is None else full.groups[train],
        mean=known.mean or full.mean,
        std=known.std or full.std,
        metric=metric or full.metric,
    )


def _sample(total: int, limit: int | None, purpose: str) -> Tensor:
    return torch.randperm(total, generator=rng.torch_generator(0, purpose))[:limit]


def _digits(image_size: int | None) -> Dataset:
    """Return scikit-learn's handwritten digits, a fifth of each class as the test set."""
    # `import sklearn.datasets` takes over a second, most of a short run's start-up; the file
    # that it would read takes a few milliseconds.
    spec = importlib.util.find_spec("sklearn")
    folder = ((spec and spec.submodule_search_locations) or [""])[0]
    table = Path(folder, "datasets", "data", "digits.csv.gz")
    if table.is_file():
        rows = np.loadtxt(table, delimiter=",", dtype=np.float32)
        pixels, labels = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    if image_size is not None:
        images = resize(images, image_size)
    # Sorted by class, every fifth sample is a fifth of each class.
    shuffled = _sample(len(targets), None, "digits")
    by_class = shuffled[targets[shuffled].argsort(stable=True)]
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    held_out[by_class[::5]] = True
    mean, std = channel_statistics(images[~held_out])
    return Dataset(
        name="digits",
        train_inputs=images[~held_out],
        train_labels=targets[~held_out],
        test_inputs=images[held_out],
        test_labels=targets[held_out],
        class_names=tuple("0123456789"),
        mean=mean,
        std=std,
    )


@dataclass(frozen=True)
class Reading:
    """How samples are turned into numbers; see ``load``."""

    image_size: int | None
    tokenizer: str | None
    max_tokens: int

    def key(self) -> tuple[object, ...]:
        """Return what the result depends on."""
        if self.tokenizer is None:
            return (self.image_size,)
        return (self.image_size, _file_state(tokenizer_file(self.tokenizer)), self.max_tokens)

    def read(self, name: str, splits: Mapping[str, Split], source: Source) -> Dataset:
        """Return the images or the texts of a data set."""
        features = splits["train"].features if "train" in splits else None
        columns = find_columns(name, features)
        if columns is None:
            return decode(name, splits, self.image_size, source.holdout)
        if self.tokenizer is None:
            raise DataError(
                f"{name} holds texts, which need a tokenizer; set data.tokenizer, or model.weights "
                "to a folder, package or hub name that has one"
            )
        return encode(name, splits, columns, source, tokenizer(self.tokenizer), self.max_tokens)


def _file_state(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return path.name, stat.st_size, stat.st_mtime_ns


def _stored(name: str, root: str | None, reading: Reading) -> Dataset:
    """Return a parquet or hub data set, from the cache if it was decoded before."""
    folder = _find_folder(name, root)
    if folder is not None:
        name = name if name in DATASETS else folder.name
        found = files.find(folder)
        state = [_file_state(path) for paths in found.values() for path in paths]
        place = cache.location(name, state, *reading.key())
    else:
        place = cache.location(name, "hub", *reading.key())
    dataset = cache.read(place)
    if dataset is None:
        log.info("decoding %s once into %s", name, place)
        source = DATASETS.get(name, Source("", hub=name))
        if folder is not None:
            with _one_sentence(f"{folder} could not be read", "check or replace its files"):
                source = dataclasses.replace(source, holdout=0.0)
                dataset = reading.read(name, files.open_splits(found), source)
        else:
            with _one_sentence(
                f"{name} could not be loaded from the Hugging Face hub",
                "check the name and the connection, or set SIZEWISE_DATA or data.root to a folder "
                f"that holds {name}/train-*.parquet and {name}/test-*.parquet",
            ):
                import datasets

                # It would report every retry; what counts is whether the last one worked.
                logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
                splits = datasets.load_dataset(source.hub, source.config, streaming=True)
                dataset = reading.read(name, splits, source)
        cache.write(place, dataset)
    return dataset


def _find_folder(name: str, root: str | None) -> Path | None:
    """Return the folder of files that a name means, or None if it must be on the hub."""
    base = root or os.environ.get("SIZEWISE_DATA")
    if root is not None and not Path(root).expanduser().is_dir():
        raise DataError(f"data.root must be a folder, but {root} is none; correct or remove it")
    direct = Path(name).expanduser()
    for folder in (Path(base or ".").expanduser() / direct, direct):
        if "train" in files.find(folder):
            return folder.absolute()
    if direct.is_absolute() or name.startswith(".") or (direct.is_dir() and name not in DATASETS):
        raise DataError(
            "expected a folder with train-*.parquet and test-*.parquet (texts: also .csv, .jsonl) "
            f"at {direct}, which has no training file; correct the path, or set SIZEWISE_DATA or "
            "data.root"
        )
    if name not in DATASETS and "/" not in name:
        raise DataError(
            f"unknown data set '{name}'; {nearest(name, DATASETS)} (or give a parquet folder "
            "under SIZEWISE_DATA or data.root, or owner/name on the Hugging Face hub)"
        )
    return None


@contextmanager
def _one_sentence(what: str, advice: str) -> Iterator[None]:
    """Turn any failure into a ``DataError``: what happened, why, what to do."""
    try:
        yield
    except SizewiseError:
        raise
    # The network, pyarrow, Pillow and datasets share no exception class.
    except Exception as error:
        log.debug("%s", what, exc_info=True)
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{what} ({type(error).__name__}: {reason}); {advice}") from None
