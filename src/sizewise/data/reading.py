"""How rows of a table become samples: pictures bytes, texts token ids, numbers vectors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sizewise.common import rng
from sizewise.data import arrays, decode
from sizewise.data.arrays import Filling
from sizewise.data.catalog import Source
from sizewise.data.columns import Columns, find
from sizewise.data.config import DataConfig
from sizewise.data.dataset import Dataset
from sizewise.data.labels import Labels, classes
from sizewise.data.samples import Samples, assembled
from sizewise.data.tables import Batch, Table, Values, runs
from sizewise.data.texts import TextReader, own_tokenizer
from sizewise.errors import ConfigError, DataError

TEST_SPLITS = ("test", "validation", "valid", "val", "validation_matched")


@dataclass(frozen=True)
class Reading:
    """How samples are turned into numbers; all of it are keys of `DataConfig`."""

    image_size: int | None = None
    tokenizer: str | None = None
    max_tokens: int = 128
    label: str | None = None
    owner: str | None = None
    holdout: float | None = None
    normalise: bool = False
    target: Literal["labels", "next"] = "labels"

    @classmethod
    def of(cls, data: DataConfig, weights: str | None) -> "Reading":
        """Return how a `[data]` table says it; weights may have a tokenizer of their own."""
        return cls(
            data.image_size,
            data.tokenizer or own_tokenizer(weights),
            data.max_tokens,
            data.label,
            data.owner,
            data.holdout,
            data.normalise,
            data.target,
        )

    def dataset(
        self,
        name: str,
        tables: Mapping[str, Table],
        source: Source,
        folder: Path | None = None,
    ) -> Dataset:
        """Read a data set into memory.

        Args:
            name: Its name.
            tables: Its splits, of which "train" is read, and the one that the source names for
                tests or else the first of `TEST_SPLITS`, if there is one.
            source: What is known about it.
            folder: Where paths of images begin that are not absolute.
        """
        if "train" not in tables:
            raise DataError(
                f"{name} has no train split, only {', '.join(sorted(tables))}; use another data set"
            )
        test = next((s for s in (source.test, *TEST_SPLITS) if s in tables), None)
        train = self.samples(f"{name}, train", tables["train"], folder)
        return assembled(
            name,
            train,
            None if test is None else self.samples(f"{name}, {test}", tables[test], folder),
            holdout=source.holdout if self.holdout is None else self.holdout,
            normalise=self.normalise,
            divided=self.owner is not None,
            metric=source.metric if self.target == "labels" else None,
        )

    def samples(self, where: str, table: Table, folder: Path | None = None) -> Samples:
        """Read the rows of a table; errors begin with `where`."""
        labelled = self.target == "labels"
        columns = find(where, table, self.label, self.owner, labelled=labelled)
        reader: TextReader | InputReader
        if columns.form in ("texts", "words"):
            if self.tokenizer is None:
                raise _no_tokenizer(where, columns)
            reader = TextReader(where, columns, self.tokenizer, self.max_tokens)
        else:
            reader = InputReader(where, columns, self, folder)
        filling = Filling(where, table.rows)
        given: list[Any] = []
        owners: list[Any] = []
        for batch in table.batches(columns.wanted()):
            parts, labels = reader.read(batch, len(given))
            for part in parts:
                filling.add(part)
            given.extend(labels)
            owners.extend(batch[columns.owner] if columns.owner else ())
        found = Samples(filling.done(), reader.labels(given), owners)
        return reader.described(found)

    def resized(self, where: str, inputs: Tensor) -> Tensor:
        """Return inputs at the size that images are to have."""
        if self.image_size is None:
            return inputs
        if inputs.dtype != torch.uint8:
            raise ConfigError(
                f"data.image_size is for images of bytes, and {where} has {inputs.dtype} "
                f"{tuple(inputs.shape[1:])}; leave it out, and resize them before"
            )
        return decode.resize(inputs, self.image_size)


def _no_tokenizer(where: str, columns: Columns) -> DataError:
    return DataError(
        f"{where} holds texts, which need a tokenizer; set data.tokenizer, or model.weights to a "
        "folder, package or hub name that has one (in a table of numbers, make numbers of "
        f"{', '.join(columns.inputs)}, or leave them out)"
    )


@dataclass(frozen=True)
class InputReader:
    """Makes images or vectors of the rows of a table."""

    where: str
    columns: Columns
    reading: Reading
    folder: Path | None

    def read(self, batch: Batch, first: int) -> tuple[Iterable[Tensor], Values]:
        """Return the inputs of a batch whose first row is of that number; its labels."""
        return self._inputs(batch, first), batch[self.columns.label]

    def labels(self, given: Sequence[Any]) -> Labels:
        """Return all labels of the table as numbers."""
        return classes(self.where, given, self.columns.names)

    def described(self, samples: Samples) -> Samples:
        """Return the samples: there is no more to say of images and vectors."""
        return samples

    def _inputs(self, batch: Batch, first: int) -> Iterable[Tensor]:
        names, where = self.columns.inputs, self.where
        if self.columns.form == "numbers":
            yield _vectors(where, {name: batch[name] for name in names}, first)
        elif self.columns.form == "arrays":
            for run in runs(where, batch[names[0]]):
                yield self.reading.resized(where, arrays.inputs(where, run, first))
                first += len(run)
        else:
            pictures = list(decode.pictures(where, batch[names[0]], self.folder, first))
            yield from decode.pixels(where, pictures, self.reading.image_size)


def _vectors(where: str, columns: Mapping[str, Values], first: int) -> Tensor:
    """Return columns of numbers as vectors, float32 (n, columns); row `first` is that before."""
    rows = np.stack([np.asarray(cells, dtype=np.float32) for cells in columns.values()], axis=1)
    for row, column in np.argwhere(~np.isfinite(rows))[:1]:
        raise DataError(
            f"{where}: row {first + row + 1} has no number in column {list(columns)[column]!r}; "
            "fill it in, or drop the row"
        )
    return torch.from_numpy(rows)


def limited(
    full: Dataset,
    train_limit: int | None,
    test_limit: int | None,
    metric: str | None,
) -> Dataset:
    """Return a data set as runs see it.

    The test set comes in a fixed random order, because evaluation with batch statistics needs
    batches of mixed classes; the training set keeps its order, which some partitions depend on.
    A limit keeps the same random samples every time.
    """
    for option, value in (("train_limit", train_limit), ("test_limit", test_limit)):
        if value is not None and value < 1:
            raise ConfigError(
                f"data.{option} must be at least 1, got {value}; leave it out for all"
            )
    train = _sample(len(full.train_labels), train_limit, "train-limit").sort().values
    test = _sample(len(full.test_labels), test_limit, "test-order")
    return replace(
        full,
        # Indexing would copy all images out of the memory map that worker processes share.
        train_inputs=full.train_inputs if train_limit is None else full.train_inputs[train],
        train_labels=full.train_labels[train],
        test_inputs=full.test_inputs[test],
        test_labels=full.test_labels[test],
        groups=None if full.groups is None else full.groups[train],
        metric=metric or full.metric,
    )


def _sample(total: int, limit: int | None, purpose: str) -> Tensor:
    return torch.randperm(total, generator=rng.torch_generator(0, purpose))[:limit]
