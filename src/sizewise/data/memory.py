"""Data that comes from Python: what is understood, and how a run folder remembers it.

A run folder cannot hold such data. Its config says `name = "memory:mine"` and a `sha256` of all
that training sees, so that nobody goes on with other data than the run was started with.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from sizewise.common.structure import build
from sizewise.data import given
from sizewise.data.catalog import MEMORY, own_name
from sizewise.data.config import DataConfig
from sizewise.data.dataset import Dataset
from sizewise.data.reading import Reading, limited
from sizewise.data.samples import assembled
from sizewise.errors import CheckpointError, ConfigError, DataError
from sizewise.exchange.state import sha256
from sizewise.fleet.devices import FleetConfig

_OF_FILES = ("root", "silos")
"""Keys of `[data]` that say which files are read."""

_OF_SAMPLES = ("label", "owner", "holdout", "normalise")
"""Keys of `[data]` that say how samples become a `Dataset`."""


_SAID = ("name", "notes", "divided")
"""Fields of a `Dataset` that no result depends on."""


def understood(
    data: object, options: Mapping[str, Any] | None = None, weights: str | None = None
) -> str | Dataset:
    """Return what `federate` was given as a name for the config, or as a `Dataset`.

    Args:
        data: What somebody has; see `docs/own-data.md`.
        options: Keys of the `[data]` table that say how it is read.
        weights: Those of the model, which may come with a tokenizer.

    Raises:
        DataError: It is not understood, or cannot be read.
    """
    if isinstance(data, str):
        return data
    if isinstance(data, PathLike):
        # Absolute, so that no folder is taken for a listed data set of the same name.
        return str(Path(data).expanduser().absolute())
    chosen = build(DataConfig, options or {}, "data")
    if isinstance(data, Dataset):
        if idle := [key for key in _OF_SAMPLES if getattr(chosen, key) not in (None, False)]:
            raise ConfigError(
                f"data.{idle[0]} says how samples become a Dataset, and a Dataset came; leave it "
                "out, and give a Dataset that is so already"
            )
        return data
    found = given.read(data, Reading.of(chosen, weights))
    full = assembled(
        given.name_of(data),
        found.train,
        found.test,
        holdout=chosen.holdout,
        normalise=chosen.normalise,
        divided=found.divided,
    )
    return limited(full, chosen.train_limit, chosen.test_limit, chosen.metric)


def implied(data: str | Dataset) -> dict[str, dict[str, Any]]:
    """Return what data says about a run: its name, or that each owner of samples is a device.

    Returns:
        The keys of `[data]` and `[fleet]` that follow, unless somebody sets them.
    """
    if isinstance(data, str):
        return {"data": {"name": data}, "fleet": {}}
    if not data.divided or data.groups is None:
        return {"data": {}, "fleet": {}}
    owners = len(set(data.groups.tolist()))
    asked = min(owners, FleetConfig.per_round)
    return {"data": {"partition": "natural"}, "fleet": {"devices": owners, "per_round": asked}}


def recorded(data: DataConfig, dataset: Dataset) -> DataConfig:
    """Return the `[data]` table of a new run whose data is given in memory."""
    check(data, dataset)
    if idle := [key for key in _OF_FILES if getattr(data, key)]:
        raise ConfigError(
            f"data.{idle[0]} says which files are read, and the data is given in memory; leave it "
            "out"
        )
    side, limits = data.image_size, (data.train_limit, data.test_limit)
    samples = (len(dataset.train_labels), len(dataset.test_labels))
    other = {
        "image_size": side is not None and dataset.shape[1:] != (side, side),
        "train_limit": limits[0] is not None and samples[0] > limits[0],
        "test_limit": limits[1] is not None and samples[1] > limits[1],
        "metric": data.metric not in (None, dataset.metric),
        "owner": data.owner is not None and dataset.groups is None,
    }
    for key in (key for key, differs in other.items() if differs):
        raise ConfigError(
            f"data.{key} is {getattr(data, key)!r}, and the Dataset in memory is not like that; "
            "leave it out, or give a Dataset that is so already"
        )
    return replace(data, name=f"{MEMORY}{dataset.name}", sha256=identity(dataset))


def check(data: DataConfig, dataset: Dataset | None) -> None:
    """Raise unless a run's data is at hand, and is what its `[data]` table has recorded."""
    if dataset is not None and not isinstance(dataset, Dataset):
        raise DataError(
            f"a session takes a sizewise Dataset, and {type(dataset).__name__} came; "
            "sizewise.data.memory.understood(data) makes one"
        )
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
        if field.name not in (*_SAID, *tensors) and values[field.name] != field.default
    }
    return hashlib.sha256((sha256(named) + json.dumps(facts)).encode()).hexdigest()
