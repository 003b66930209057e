"""What people have in Python, as training and test samples: torch, Hugging Face, pandas, arrays.

Data comes whole, as a pair (train, test), or divided: one set of samples for each device.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from sizewise.common.structure import format_bytes
from sizewise.data import arrays, samples
from sizewise.data.arrays import is_array
from sizewise.data.labels import classes
from sizewise.data.reading import TEST_SPLITS, Reading
from sizewise.data.samples import Samples
from sizewise.data.tables import Items, Plain, Stream, Table, kind_of_value, of_frame
from sizewise.errors import DataError

SCALARS = ("whole", "number", "truth", "text")


@dataclass(frozen=True)
class Given:
    """What came.

    Attributes:
        train: The training samples.
        test: The test samples, if some came.
        divided: Whether the samples have owners who are the devices.
    """

    train: Samples
    test: Samples | None = None
    divided: bool = False


def name_of(data: object) -> str:
    """Return what to call data that has no name."""
    if isinstance(data, tuple):
        return "tensors"
    if isinstance(data, list | Mapping) and not _is(data, "datasets", "DatasetDict"):
        return "samples" if isinstance(data, list) and _is_sample(data[:1]) else "devices"
    return type(data).__name__


def read(data: Any, reading: Reading) -> Given:
    """Return the samples of what somebody has.

    Raises:
        DataError: It is nothing that is understood.
    """
    if isinstance(data, tuple) and data and all(map(_is_values, data)):
        return _of_arrays(data, reading)
    if isinstance(data, tuple) and len(data) == 2 and not _is_labelled(data):
        train = read(data[0], reading)
        if train.test is not None:
            raise DataError("the training half of a pair has a test set of its own; leave it out")
        return replace(train, test=one(data[1], reading))
    if isinstance(data, Mapping) and "train" in data:
        test = next((split for split in TEST_SPLITS if split in data), None)
        train = read(data["train"], reading)
        return train if test is None else replace(train, test=one(data[test], reading))
    if isinstance(data, Mapping) and not _is_table(data):
        whole = all(isinstance(key, int) for key in data)
        return _of_devices([data[key] for key in (sorted(data) if whole else data)], reading)
    if isinstance(data, list) and not _is_sample(data[:1]):
        return _of_devices(data, reading)
    return Given(one(data, reading), divided=reading.owner is not None)


def one(data: Any, reading: Reading) -> Samples:
    """Return one set of samples."""
    where = type(data).__name__
    if isinstance(data, DataLoader):
        found = one(_dataset_of(data), reading)
        ignored = f"of the DataLoader its data set is taken, not its batch size, {data.batch_size}"
        return replace(found, notes=(*found.notes, ignored))
    if isinstance(data, Subset) and isinstance(data.dataset, TensorDataset):
        data = TensorDataset(*(part[list(data.indices)] for part in data.dataset.tensors))
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return _labelled(where, data.tensors[0], data.tensors[1], reading)
    if isinstance(data, tuple) and len(data) == 2 and _is_labelled(data):
        return _labelled("the data", _values(data[0]), _values(data[1]), reading)
    table = _table(data, where)
    return samples.said(where, reading.samples(where, table), drawn=isinstance(table, Items))


def _table(data: Any, where: str) -> Table:
    """Return the rows of what somebody has."""
    if _is(data, "pandas", "DataFrame"):
        return of_frame(data)
    if _is(data, "datasets", "Dataset", "IterableDataset"):
        if not data.features:
            raise DataError(f"{where} does not know its columns; give a datasets.Dataset")
        return Stream(data)
    if isinstance(data, Mapping):
        return Plain({str(key): _values(column) for key, column in data.items()})
    if isinstance(data, IterableDataset) or not (
        hasattr(data, "__getitem__") and not isinstance(data, str | tuple)
    ):
        if isinstance(data, Iterable) and not isinstance(data, str | tuple):
            raise DataError(
                f"{where} is iterable-style: its samples have no numbers; collect them, such as in "
                "list(data), or give a map-style Dataset"
            )
        raise DataError(not_understood(data))
    return Items(data, where)


def not_understood(data: object) -> str:
    """Return what to say of something that is no data."""
    kind = type(data)
    came = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return (
        "data is a data set's name, a folder or file (str or Path), a torch or Hugging Face "
        "Dataset, a pandas frame, a tuple (inputs, labels) or (train_inputs, train_labels, "
        "test_inputs, test_labels) of arrays, a pair (train, test), a list with the data of each "
        f"device, or a sizewise Dataset; {came} came: make one of these of it (docs/own-data.md)"
    )


def _of_arrays(data: tuple[Any, ...], reading: Reading) -> Given:
    """Return the samples of two, three or four arrays."""
    where = "the data"
    if len(data) not in (2, 3, 4):
        raise DataError(
            f"a tuple of arrays is (inputs, labels), (inputs, labels, owners) or (train_inputs, "
            f"train_labels, test_inputs, test_labels); {len(data)} came: give one of these"
        )
    values = [_values(part) for part in data]
    if len(values) == 4:
        if values[1].ndim > 2:
            raise DataError(
                "four arrays are train_inputs, train_labels, test_inputs, test_labels, in this "
                f"order, and the second is {tuple(values[1].shape)}; put the labels there"
            )
        train, test = (_labelled(where, values[i], values[i + 1], reading) for i in (0, 2))
        return Given(train, test)
    train = _labelled(where, values[0], values[1], reading)
    if len(values) == 2:
        return Given(train)
    owned = replace(train, owners=np.asarray(values[2]).reshape(-1))
    return Given(samples.checked(where, owned), divided=True)


def _of_devices(parts: Sequence[Any], reading: Reading) -> Given:
    """Return the samples of one data set for each device."""
    if not parts:
        raise DataError("the data is an empty list; give one data set for each device")
    # The whole set is what is said of, not each of its parts.
    found = [read(part, reading) for part in parts]
    if any(part.divided for part in found):
        raise DataError("the data of a device has owners itself; leave out data.owner")
    tests = [part.test for part in found if part.test is not None]
    if len(tests) not in (0, len(found)):
        raise DataError(
            f"{len(tests)} of {len(found)} devices have a test set; give one to all or to none, or "
            "give (devices, test)"
        )
    train = samples.joined([replace(part.train, notes=()) for part in found], "the devices' data")
    owners = np.repeat(np.arange(len(found)), [len(part.train) for part in found])
    size = format_bytes(train.inputs.numel() * train.inputs.element_size())
    note = f"{len(found)} devices came with {len(train):,} samples, {size} in memory"
    return Given(
        replace(train, owners=owners, notes=(note,)),
        samples.joined(tests, "the devices' test data") if tests else None,
        divided=True,
    )


def _labelled(where: str, inputs: Any, given: Any, reading: Reading) -> Samples:
    """Return the samples of an array, a frame or a list of texts, and their labels."""
    if _is(inputs, "pandas", "DataFrame") or not is_array(inputs) or _holds_objects(inputs):
        frame = _is(inputs, "pandas", "DataFrame")
        table = of_frame(inputs) if frame else Plain({"input": list(inputs)})
        return reading.samples(where, table.with_column(reading.label or "label", given))
    kept = reading.resized(where, arrays.inputs(where, inputs))
    return samples.checked(where, Samples(kept, classes(where, given)))


def _dataset_of(loader: DataLoader[Any]) -> Any:
    """Return the data set of a loader; raise DataError if the loader makes something else of it."""
    data, sampler = loader.dataset, loader.sampler
    if isinstance(data, IterableDataset):
        return data
    whole = type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == len(data)  # type: ignore[arg-type]
    if not whole or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise DataError(
            "of a DataLoader its data set is taken, and this one's sampler chooses samples, which "
            "would be lost; give the data set, or a torch.utils.data.Subset of it"
        )
    if loader.collate_fn not in (default_collate, default_convert):
        raise DataError(
            "of a DataLoader its data set is taken, and this one's collate_fn would be lost; give "
            "a data set whose samples are what a model takes"
        )
    return data


def _is(data: object, package: str, *names: str) -> bool:
    """Return whether something is of a class of a package, which is not imported for that."""
    module = sys.modules.get(package)
    return module is not None and isinstance(data, tuple(getattr(module, name) for name in names))


def _is_values(value: object) -> bool:
    return is_array(value) or _is(value, "pandas", "Series")


def _holds_objects(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind in "OUT"


def _values(value: Any) -> Any:
    return value.to_numpy() if _is(value, "pandas", "Series") else value


def _is_labelled(pair: tuple[Any, ...]) -> bool:
    """Return whether a pair is (inputs, labels); else it is (train, test)."""
    inputs, given = pair
    flat = _is_values(given) or (isinstance(given, list) and not _is_values(given[:1]))
    worded = isinstance(inputs, list) and isinstance(next(iter(inputs), None), str)
    return flat and (_is_values(inputs) or _is(inputs, "pandas", "DataFrame") or worded)


def _is_sample(rows: list[Any]) -> bool:
    """Return whether a list begins with a sample: a pair with a label, or a dict."""
    first = next(iter(rows), None)
    if isinstance(first, Mapping):
        return "train" not in first and not _is_table(first)
    if not isinstance(first, tuple | list) or len(first) != 2:
        return False
    return kind_of_value(first[1]).what in SCALARS


def _is_table(columns: Mapping[Any, Any]) -> bool:
    """Return whether a dict holds columns: arrays, or lists of values that are no samples."""
    return all(
        _is_values(column)
        or (isinstance(column, list) and not isinstance(next(iter(column), None), tuple | dict))
        for column in columns.values()
    ) and not any(isinstance(column, Tensor) and column.ndim == 0 for column in columns.values())
