"""Load a data set by name: bundled digits, a file or folder, or the Hugging Face hub.

Parquet and the hub are read as a stream, so ``datasets`` writes no Arrow copy of its own; what is
kept on disk, once, are the decoded bytes (see ``cache``).
"""

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from sizewise.common.structure import nearest
from sizewise.data import cache, files, hub
from sizewise.data.catalog import DATASETS, Source
from sizewise.data.columns import IMAGE_ENDINGS, find
from sizewise.data.config import DataConfig
from sizewise.data.dataset import Dataset
from sizewise.data.decode import channel_statistics, resize
from sizewise.data.reading import Reading, limited
from sizewise.data.samples import held_out
from sizewise.data.silos import join
from sizewise.data.tables import Stream
from sizewise.data.texts import tokenizer_file
from sizewise.errors import ConfigError, DataError, SizewiseError

__all__ = ["Dataset", "configured", "load"]

log = logging.getLogger(__name__)


def load(
    name: str,
    root: str | None = None,
    *,
    train_limit: int | None = None,
    test_limit: int | None = None,
    metric: str | None = None,
    silos: Sequence[str] = (),
    image_size: int | None = None,
    tokenizer: str | None = None,
    max_tokens: int = 128,
    label: str | None = None,
    owner: str | None = None,
    holdout: float | None = None,
    normalise: bool = False,
    target: Literal["labels", "next"] = "labels",
) -> Dataset:
    """Load a data set into memory; see ``limited`` for its order.

    All arguments are keys of ``DataConfig``, which describes them; see ``files`` for what a name
    may be.

    Raises:
        DataError: If the data set cannot be found or read.
        ConfigError: If a limit or the size is below 1.
    """
    for option, value in (("image_size", image_size), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ConfigError(
                f"data.{option} must be at least 1, got {value}; leave it out for all"
            )
    reading = Reading(image_size, tokenizer, max_tokens, label, owner, holdout, normalise, target)
    parts = [
        _digits(image_size) if each == "digits" else _stored(each, root, reading)
        for each in (name, *silos)
    ]
    full = join(parts) if silos else parts[0]
    known = DATASETS.get(full.name, Source(""))
    full = dataclasses.replace(full, mean=known.mean or full.mean, std=known.std or full.std)
    return limited(full, train_limit, test_limit, metric)


def configured(data: DataConfig, weights: str | None) -> Dataset:
    """Load what a ``[data]`` table names; the model's weights may come with a tokenizer."""
    reading = Reading.of(data, weights)
    return load(
        data.name,
        data.root,
        train_limit=data.train_limit,
        test_limit=data.test_limit,
        metric=data.metric,
        silos=data.silos,
        **dataclasses.asdict(reading),
    )


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
    tested = held_out(targets, 0.2, purpose="digits")
    mean, std = channel_statistics(images[~tested])
    return Dataset(
        name="digits",
        train_inputs=images[~tested],
        train_labels=targets[~tested],
        test_inputs=images[tested],
        test_labels=targets[tested],
        class_names=tuple("0123456789"),
        mean=mean,
        std=std,
    )


def _stored(name: str, root: str | None, reading: Reading) -> Dataset:
    """Return data from files or the hub, from the cache if it was decoded before."""
    place = _find_files(name, root)
    key: list[object] = [dataclasses.astuple(reading)]
    if reading.tokenizer is not None:
        key.append(_file_state(file := tokenizer_file(reading.tokenizer), file.parent))
    if place is not None:
        name = name if name in DATASETS else place.stem if place.is_file() else place.name
        found = files.find(place)
        home = place.parent if place.is_file() else place
        key += [_file_state(path, home) for paths in found.values() for path in paths]
    kept = cache.location(name, *key)
    dataset = cache.read(kept)
    if dataset is not None:
        return dataset
    log.info("decoding %s once into %s", name, kept)
    source = DATASETS.get(name, Source("", hub=name))
    if place is not None:
        with _one_sentence(f"{place} could not be read", "check or replace its files"):
            tables = files.open_splits(place, found)
            dataset = reading.dataset(name, tables, source, home)
            # Images that a table names can change while the table stays what it is.
            named = found["train"][0].suffix.lower() not in IMAGE_ENDINGS
            labelled = reading.target == "labels"
            columns = find(name, tables["train"], reading.label, labelled=labelled)
            if named and columns.form == "paths":
                return dataset
    else:
        with _one_sentence(
            f"{name} could not be loaded from the Hugging Face hub",
            "check the name and the connection, or set SIZEWISE_DATA or data.root to a folder "
            f"that holds {name}/train-*.parquet and {name}/test-*.parquet",
        ):
            if not hub.reachable():
                raise ConnectionError("there is no network")
            import datasets

            # It would report every retry; what counts is whether the last one worked.
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
            splits = datasets.load_dataset(source.hub, source.config, streaming=True)
            tables = {split: Stream(stream) for split, stream in splits.items()}
            dataset = reading.dataset(name, tables, source)
    cache.write(kept, dataset)
    return dataset


def _file_state(path: Path, home: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path.relative_to(home)), stat.st_size, stat.st_mtime_ns


def _find_files(name: str, root: str | None) -> Path | None:
    """Return the folder or file that a name means, or None if it must be on the hub."""
    base = root or os.environ.get("SIZEWISE_DATA")
    if root is not None and not Path(root).expanduser().is_dir():
        raise DataError(f"data.root must be a folder, but {root} is none; correct or remove it")
    direct = Path(name).expanduser()
    for place in (Path(base or ".").expanduser() / direct, direct):
        if "train" in files.find(place):
            return place.absolute()
    here = direct.exists() and name not in DATASETS
    named = direct.suffix[1:] in files.ENDINGS
    if direct.is_absolute() or name.startswith(".") or here or named:
        raise DataError(
            "expected a folder with train-*.parquet and test-*.parquet (or .csv, .jsonl), with "
            f"images such as train/cat/1.png, or a single such file at {direct}, where there is "
            "no such thing; correct the path, or set SIZEWISE_DATA or data.root"
        )
    if name not in DATASETS and "/" not in name:
        raise DataError(
            f"unknown data set '{name}'; {nearest(name, DATASETS)} (or give a file or folder, also "
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
