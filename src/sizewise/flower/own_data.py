"""Data of a node's own: read as the config says, and seen as all others see theirs."""

import hashlib
from dataclasses import replace
from typing import Any

from sizewise.config import Config
from sizewise.data import sources
from sizewise.data.dataset import Dataset
from sizewise.errors import DataError


def told(dataset: Dataset) -> dict[str, Any]:
    """Return what a server tells nodes of its data, so that theirs can be like it."""
    facts = ("shape", "class_names", "mean", "std")
    return {
        **{name: getattr(dataset, name) for name in facts},
        "dtype": str(dataset.train_inputs.dtype),
        "tokenizer": _hash(dataset),
    }


def load(place: str, config: Config, common: dict[str, Any]) -> tuple[Config, Dataset]:
    """Return the data in a node's folder or file, and the config of a run on all of it."""
    # What is said about the server's data does not concern the owner of this.
    own = replace(
        config.data, name=place, root=None, owner=None, silos=(), train_limit=None, test_limit=None
    )
    dataset = like_the_others(sources.configured(own, config.model.weights), **common)
    # Every device "draws" all of its own samples.
    samples = len(dataset.train_labels)
    data = replace(config.data, partition="draw", samples_per_device=samples)
    return replace(config, data=data), dataset


def like_the_others(
    dataset: Dataset,
    shape: list[int],
    class_names: list[str],
    mean: list[float],
    std: list[float],
    dtype: str,
    tokenizer: str,
) -> Dataset:
    """Return a node's own data, labelled and normalised as everybody's."""
    own = str(dataset.train_inputs.dtype)
    if (dataset.shape, own) != (tuple(shape), dtype):
        raise DataError(
            f"its inputs are {own} {dataset.shape}, and those of the run {dtype} {tuple(shape)}; "
            f"set data.image_size, or convert them"
        )
    if tokenizer and _hash(dataset) != tokenizer:
        raise DataError("its tokenizer is another one than the run's; set data.tokenizer to that")
    if dataset.classes > len(class_names):
        raise DataError(
            f"its data has {dataset.classes} classes, and the run has {len(class_names)}; "
            f"label it as the run does"
        )
    return replace(dataset.in_classes(tuple(class_names)), mean=tuple(mean), std=tuple(std))


def _hash(dataset: Dataset) -> str:
    """Return a hash of the tokenizer that made a data set of texts; nothing for other data."""
    stored = dataset.tokenizer.encode()
    return hashlib.sha256(stored).hexdigest() if stored else ""
