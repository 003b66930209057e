"""One face for all that has rows and columns: what its columns hold, and its rows in batches.

A `Table` is made of a Hugging Face data set (`Stream`), of lists or arrays by name, such as those
of a pandas frame (`Plain`), or of a torch data set, whose samples are its rows (`Items`).
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from sizewise.data.arrays import tensor
from sizewise.errors import DataError

BATCH = 1000

What = Literal[
    "image", "text", "class", "whole", "number", "truth", "array", "words", "tags", "other"
]
Values = Sequence[Any] | NDArray[Any]
Batch = Mapping[str, Values]


@dataclass(frozen=True)
class Kind:
    """What a column holds; classes and tags may have names."""

    what: What
    names: tuple[str, ...] = ()


class Table(Protocol):
    """Rows and columns."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """What each column holds."""
        ...

    @property
    def rows(self) -> int | None:
        """How many rows there are, where that is known before they are read."""
        ...

    def first(self, column: str) -> object:
        """Return what a column holds in the first row; None if that cannot be told in advance."""
        ...

    def batches(self, columns: Iterable[str], size: int = BATCH) -> Iterator[Batch]:
        """Yield the rows of some columns, up to so many at a time."""
        ...


class Split(Protocol):
    """The part of `datasets.Dataset` and `datasets.IterableDataset` that is used here."""

    features: Mapping[str, Any] | None

    def select_columns(self, column_names: list[str]) -> "Split":
        """Keep only these columns."""

    def with_format(self, type: str | None) -> "Split":
        """Give values as lists (None) or arrays ("numpy")."""

    def iter(self, batch_size: int) -> Iterator[dict[str, Any]]:
        """Yield batches, a list or an array per column."""


class Stream:
    """The rows of a Hugging Face data set; a stream may come with its first row's values."""

    def __init__(self, split: Split, first: Mapping[str, object] | None = None) -> None:
        self._split, self._first = split, first or {}
        self.kinds = {key: kind_of(feature) for key, feature in (split.features or {}).items()}
        self.rows: int | None = getattr(split, "num_rows", None)

    def first(self, column: str) -> object:
        """Return what a column holds in the first row.

        A stream is not asked: one that is not read to its end can crash pyarrow later.
        """
        if self.rows is None:
            return self._first.get(column)
        return next((batch[column][0] for batch in self.batches([column], 1)), None)

    def batches(self, columns: Iterable[str], size: int = BATCH) -> Iterator[Batch]:
        """Yield the rows of some columns."""
        wanted = list(columns)
        # Nested lists of numbers would become Python objects one by one.
        arrays = any(self.kinds[key].what == "array" for key in wanted)
        split = self._split.select_columns(wanted)
        return split.with_format("numpy" if arrays else None).iter(batch_size=size)


def kind_of(feature: Any) -> Kind:
    """Return what a column of a Hugging Face data set holds."""
    import datasets  # A second of import time that reading the cache does not need.

    if isinstance(feature, datasets.Image):
        return Kind("image")
    if isinstance(feature, datasets.ClassLabel):
        return Kind("class", tuple(feature.names))
    if isinstance(feature, Mapping):  # Images whose file does not say that they are some.
        return Kind("image" if "bytes" in feature else "other")
    inner = getattr(feature, "feature", None)
    if inner is not None:
        held = kind_of(inner)
        within: dict[What, What] = {"text": "words", "class": "tags", "other": "other"}
        return Kind(within.get(held.what, "array"), held.names)
    if type(feature).__name__.startswith("Array"):
        return Kind("array")
    return Kind(_of_type(str(getattr(feature, "dtype", ""))))


def _of_type(name: str) -> What:
    if name in ("string", "large_string", "string_view"):
        return "text"
    if name == "binary":
        return "image"
    if name == "bool":
        return "truth"
    if "int" in name:
        return "whole"
    return "number" if name.startswith(("float", "double", "decimal")) else "other"


class Plain:
    """Columns that are lists or arrays."""

    def __init__(self, columns: Mapping[str, Values]) -> None:
        self._columns = columns
        self.kinds = {key: kind_of_values(values) for key, values in columns.items()}
        self.rows = min((len(values) for values in columns.values()), default=0)

    def first(self, column: str) -> object:
        """Return what a column holds in the first row."""
        return self._columns[column][0] if self.rows else None

    def batches(self, columns: Iterable[str], size: int = BATCH) -> Iterator[Batch]:
        """Yield the rows of some columns."""
        wanted = {key: self._columns[key] for key in columns}
        for start in range(0, self.rows, size):
            yield {key: values[start : start + size] for key, values in wanted.items()}

    def with_column(self, name: str, values: Values) -> "Plain":
        """Return the table with a further column, which must be as long as the others."""
        if len(values) != self.rows:
            raise DataError(f"{self.rows:,} inputs came with {len(values):,} labels; give one each")
        return Plain({**self._columns, name: values})


def of_frame(frame: Any) -> Plain:
    """Return the rows of a pandas frame."""
    columns: dict[str, Values] = {}
    for position, name in enumerate(frame.columns):
        values = frame.iloc[:, position]
        simple = values.dtype.kind in "biuf" and isinstance(values.dtype, np.dtype)
        columns[str(name)] = values.to_numpy() if simple else values.astype(object).tolist()
    return Plain(columns)


def kind_of_values(values: Values) -> Kind:
    """Return what a list or an array holds, by its type or its first value."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biuf":
        return kind_of_value(values.dtype.type(0))
    present = (value for value in values if value is not None and value is not np.nan)
    return kind_of_value(next(present, None))


def kind_of_value(value: object) -> Kind:
    """Return what a single value is."""
    if isinstance(value, Tensor):
        # A scalar of any type is a number of that type.
        value = np.empty(tuple(value.shape)) if value.ndim else value.item()
    if isinstance(value, str):
        return Kind("text")
    if isinstance(value, bool | np.bool_):
        return Kind("truth")
    if isinstance(value, int | np.integer):
        return Kind("whole")
    if isinstance(value, float | np.floating):
        return Kind("number")
    if isinstance(value, Image.Image | bytes) or (isinstance(value, Mapping) and "bytes" in value):
        return Kind("image")
    if isinstance(value, np.ndarray):
        return kind_of_value(value.item()) if value.ndim == 0 else Kind("array")
    if isinstance(value, list | tuple) and value:
        held = kind_of_value(value[0]).what
        return Kind(
            "words" if held == "text" else "other" if held in ("image", "other") else "array"
        )
    return Kind("other")


INPUT, LABEL = "input", "label"
"""Names of the columns of a torch data set whose samples are pairs."""


class Items:
    """The samples of a torch data set, which are asked for one by one, with a bar on a terminal."""

    def __init__(self, data: TorchDataset[Any], where: str) -> None:
        self._data, self._where = data, where
        try:
            self.rows = len(data)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            raise DataError(
                f"{where} does not say how many samples it has; give it a __len__, or collect them "
                "in a list of (input, label) in a Dataset of your own"
            ) from None
        if self.rows == 0:
            raise DataError(f"{where} has no samples; use other data")
        self._named = isinstance(self._sample(0), Mapping)
        self.kinds = {key: kind_of_value(value) for key, value in self._row(0).items()}

    def first(self, column: str) -> object:
        """Return what a column holds in the first row."""
        return self._row(0)[column]

    def _sample(self, number: int) -> Any:
        try:
            return self._data[number]
        except Exception as error:  # Code of the user's may raise anything.
            raise DataError(
                f"{self._where}: its sample {number} cannot be read ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}); check its __getitem__"
            ) from error

    def _row(self, number: int) -> Mapping[str, Any]:
        sample = self._sample(number)
        if isinstance(sample, Mapping) and self._named:
            return sample
        if isinstance(sample, tuple | list) and len(sample) == 2 and not self._named:
            return {INPUT: sample[0], LABEL: sample[1]}
        size = f" of {len(sample)}" if isinstance(sample, tuple | list | Mapping) else ""
        raise DataError(
            f"{self._where}: a sample is a pair (input, label) or a dict of named parts, the same "
            f"for all; sample {number} is a {type(sample).__name__}{size}: wrap it in a Dataset "
            "that gives such pairs"
        )

    def batches(self, columns: Iterable[str], size: int = BATCH) -> Iterator[Batch]:
        """Yield the rows of some columns."""
        wanted = list(columns)
        batch: dict[str, list[Any]] = {key: [] for key in wanted}
        for number in _shown(range(self.rows), self._where):
            row = self._row(number)
            for key in wanted:
                batch[key].append(row.get(key))
            if len(batch[wanted[0]]) == size or number == self.rows - 1:
                yield batch
                batch = {key: [] for key in wanted}


def _shown(numbers: range, where: str) -> Iterable[int]:
    """Return numbers to go through; on a terminal, a bar follows them."""
    if not sys.stderr.isatty():
        return numbers
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(numbers, f"reading {where}", console=console, transient=True)


def runs(where: str, cells: Values) -> Iterator[Tensor]:
    """Yield arrays, tensors or lists of numbers as tensors (n, ...), one for a run of a shape."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind != "O":
        yield tensor(where, cells)
        return
    try:
        arrays = [cell if isinstance(cell, Tensor) else np.asarray(cell) for cell in cells]
    except ValueError:
        raise DataError(
            f"{where}: an input is one array, and some are lists of arrays of different lengths; "
            "give one array a sample"
        ) from None
    for _, run in groupby(arrays, key=lambda array: (type(array), array.dtype, array.shape)):
        same: list[Any] = list(run)
        stacked = torch.stack(same) if isinstance(same[0], Tensor) else np.stack(same)
        yield tensor(where, stacked)
