"""Data that comes from Python: what is understood, and how a run folder remembers it.

A run folder cannot hold such data. Its config says `name = "memory:mine"` and a `sha256` of all
that training sees, so that nobody goes on with other data than the run was started with.
"""

import hashlib
import json
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sizewise.data.catalog import MEMORY, own_name
from sizewise.data.config import DataConfig
from sizewise.data.dataset import Dataset
from sizewise.data.decode import channel_statistics
from sizewise.errors import CheckpointError, ConfigError, DataError
from sizewise.exchange.state import sha256

_READ_ONLY = ("root", "train_limit", "test_limit", "image_size", "metric", "silos")
"""Keys of `[data]` that say how files are read."""


def understood(data: object) -> str | Dataset:
    """Return what `federate` was given as a name for the config, or as a `Dataset`.

    Raises:
        DataError: It is neither a name, a folder, a `Dataset`, nor four tensors.
    """
    if isinstance(data, str | Dataset):
        return data
    if isinstance(data, PathLike):
        # Absolute, so that no folder is taken for a listed data set of the same name.
        return str(Path(data).expanduser().absolute())
    if isinstance(data, tuple) and [isinstance(p, Tensor | np.ndarray) for p in data] == [True] * 4:
        return of_tensors(*data)
    raise DataError(_not_understood(data))


def _not_understood(data: object) -> str:
    kind = type(data)
    came = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return (
        "data is a data set's name, a folder of files (str or Path), a sizewise Dataset, or a "
        f"tuple (train_inputs, train_labels, test_inputs, test_labels) of tensors; {came} came: "
        "make a sizewise.data.dataset.Dataset of its tensors"
    )


def of_tensors(train_inputs: Any, train_labels: Any, test_inputs: Any, test_labels: Any) -> Dataset:
    """Return the `Dataset` of images, uint8 (N, C, H, W), and labels, whole numbers from 0, (N,).

    Each is a tensor or an array.
    """
    images = [torch.as_tensor(part).contiguous() for part in (train_inputs, test_inputs)]
    labels = [torch.as_tensor(part) for part in (train_labels, test_labels)]
    for part in images:
        if part.dtype != torch.uint8 or part.ndim != 4 or len(part) == 0:
            raise DataError(
                "inputs in a tuple are images, uint8 (N, C, H, W) with values from 0 to 255; "
                f"{part.dtype} {tuple(part.shape)} came: convert them, or make a Dataset"
            )
    for part in labels:
        if part.is_floating_point() or part.is_complex() or part.ndim != 1 or len(part) == 0:
            raise DataError(
                "labels in a tuple are whole numbers from 0, one for each input; "
                f"{part.dtype} {tuple(part.shape)} came: convert them, or make a Dataset"
            )
    train, test = (part.long() for part in labels)
    mean, std = channel_statistics(images[0])
    names = tuple(map(str, range(int(train.max()) + 1)))
    return Dataset("tensors", images[0], train, images[1], test, names, mean, std)


def recorded(data: DataConfig, dataset: Dataset) -> DataConfig:
    """Return the `[data]` table of a new run whose data is given in memory."""
    check(data, dataset)
    idle = [key for key in _READ_ONLY if getattr(data, key)]
    if idle:
        raise ConfigError(
            f"data.{idle[0]} says how files are read, and the data is given in memory; leave it "
            "out, and give a Dataset that is so already"
        )
    return replace(data, name=f"{MEMORY}{dataset.name}", sha256=identity(dataset))


def check(data: DataConfig, dataset: Dataset | None) -> None:
    """Raise unless a run's data is at hand, and is what its `[data]` table has recorded."""
    if dataset is not None and not isinstance(dataset, Dataset):
        raise DataError(_not_understood(dataset))
    if dataset is None and data.name.startswith(MEMORY):
        raise DataError(
            f"the data of this run, {own_name(data.name)!r}, was given in memory; give it again, "
            "from Python: session.started(config, dataset=data), session.resumed(folder, data) or "
            "deployment.export(folder, file, dataset=data)"
        )
    if dataset is not None and data.sha256 not in (None, identity(dataset)):
        raise CheckpointError(
            f"the data is not what this run was started with ({own_name(data.name)!r}, by its "
            "data.sha256); give that, or start a new run"
        )


def identity(dataset: Dataset) -> str:
    """Return a hash of all that training and evaluation see of a data set; not of its name."""
    values = {field.name: getattr(dataset, field.name) for field in fields(dataset)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    # Hashes are kept in configs: they go by the names that these two had when the first was made.
    named = {name.replace("inputs", "images"): tensor for name, tensor in tensors.items()}
    # A field that a later version adds must not change the hash of data that does not use it.
    facts = {
        field.name: values[field.name]
        for field in fields(dataset)
        if field.name not in ("name", *tensors) and values[field.name] != field.default
    }
    return hashlib.sha256((sha256(named) + json.dumps(facts)).encode()).hexdigest()
