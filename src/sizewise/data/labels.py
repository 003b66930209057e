"""Labels of any kind as numbers: whole numbers, words, true and false, one-hot rows, scores."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sizewise.data.dataset import Target
from sizewise.errors import DataError

SHOWN = 9
"""Names that an error lists."""


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of some samples.

    Attributes:
        values: Classes, int64 (N,); tags or next tokens, int64 (N, T); or scores, float32 (N,).
        names: One per class or tag; none where the classes are plain numbers.
        target: Which of these they are.
    """

    values: Tensor
    names: tuple[str, ...] = ()
    target: Target = "class"

    def __getitem__(self, rows: Tensor) -> "Labels":
        return replace(self, values=self.values[rows])

    def named(self) -> tuple[str, ...]:
        """Return the names of all classes; numbers are named after themselves."""
        if self.target in ("score", "next"):
            return (self.target,)
        return self.names or tuple(map(str, range(int(self.values.max()) + 1)))

    def numbered_as(self, names: tuple[str, ...], where: str) -> "Labels":
        """Return the same labels with the numbers that training samples have for them.

        Args:
            names: Their classes, in order; none where they are plain numbers.
            where: What an error begins with.

        Raises:
            DataError: One of the labels is not among them.
        """
        if self.names == names or self.target in ("score", "next") or (names and not self.names):
            return replace(self, names=names)
        known = {name: number for number, name in enumerate(names)}
        if unknown := [name for name in self.names if name not in known]:
            raise DataError(
                f"{where}: no training sample has the label {unknown[0]!r}; they have "
                f"{', '.join(names[:SHOWN])}: correct it, or add training samples with it"
            )
        numbers = torch.tensor([known[name] for name in self.names])
        values = torch.where(self.values < 0, self.values, numbers[self.values.clamp(min=0)])
        return replace(self, values=values, names=names)


def classes(where: str, given: Any, names: tuple[str, ...] = ()) -> Labels:
    """Return classes as numbers.

    Args:
        where: What an error begins with.
        given: A tensor, an array or a list of one label a sample: whole numbers from 0, words,
            true and false, or one-hot rows. Words get numbers as `in_order` has them.
        names: Of the numbers, where they have names.
    """
    values = _array(where, given)
    if values.ndim == 2 and values.shape[1] > 1:
        values = _from_one_hot(where, values)
    values = values.reshape(len(values)) if values.size == len(values) else values
    if values.ndim != 1:
        raise DataError(f"{where}: expected one label a sample, got labels {values.shape}")
    if values.dtype.kind in "UT":
        found, inverse = np.unique(values, return_inverse=True)
        words = tuple(map(str, found))
        numbers = torch.from_numpy(inverse.astype(np.int64))
        return Labels(numbers, words).numbered_as(in_order(words), where)
    if values.dtype.kind == "b":
        names = ("false", "true")
    if values.dtype.kind == "f":
        if bool(np.isnan(values).any()):
            row = int(np.isnan(values).argmax()) + 1
            raise DataError(f"{where}: row {row} has no label; fill it in, or drop the row")
        if len(parts := values[values != np.rint(values)]):
            raise DataError(
                f"{where}: labels are classes, and {float(parts[0]):g} is none; give whole "
                "numbers from 0 or words (scores are for texts only)"
            )
    elif values.dtype.kind not in "biu":
        raise DataError(
            f"{where}: labels are whole numbers from 0 or words, and {values.dtype} came; "
            "convert them"
        )
    return Labels(torch.from_numpy(values.astype(np.int64)), names)


def scores(where: str, given: Any) -> Labels:
    """Return scores, as float32 (N,)."""
    values = torch.from_numpy(_array(where, given).astype(np.float32))
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).int().argmax()) + 1
        raise DataError(f"{where}: row {row} has no label; fill it in, or drop the row")
    return Labels(values, target="score")


def joined(parts: Sequence[Labels], where: str) -> Labels:
    """Return the labels of several sets of samples as one; each word has one number in all."""
    worded = any(part.names for part in parts)
    words = {name for part in parts for name in (part.named() if worded else ())}
    known = [part.names for part in parts if set(part.names) == words]
    # Names that a source gave an order keep it.
    names = known[0] if known else in_order(words)
    numbered = [
        replace(part, names=part.named() if worded else ()).numbered_as(names, where)
        for part in parts
    ]
    return replace(numbered[0], values=torch.cat([part.values for part in numbered]))


def in_order(words: Iterable[str]) -> tuple[str, ...]:
    """Return words sorted by the alphabet; as numbers, if all of them are whole numbers."""
    known = list(words)
    numeric = all(map(str.isdecimal, known))
    return tuple(sorted(known, key=lambda word: (int(word) if numeric else 0, word)))


def _array(where: str, given: Any) -> NDArray[Any]:
    """Return labels as an array of one type."""
    if isinstance(given, Tensor):
        return given.detach().cpu().numpy()
    if isinstance(given, np.ndarray) and given.dtype.kind != "O":
        return given
    cells = list(given)
    kinds = {type(cell) for cell in cells}
    if len(kinds) > 1 or type(None) in kinds:
        lacking = [row for row, cell in enumerate(cells, 1) if missing(cell)]
        if lacking:
            raise DataError(f"{where}: row {lacking[0]} has no label; fill it in, or drop the row")
        if any(issubclass(kind, str) for kind in kinds) and not all(
            issubclass(kind, str) for kind in kinds
        ):
            raise DataError(
                f"{where}: labels are of one kind, and {_listed(kinds)} came; make all of them "
                "whole numbers or all of them words"
            )
    try:
        if issubclass(next(iter(kinds), int), Tensor):
            return torch.stack(cells).numpy()
        return np.asarray(cells)
    except (ValueError, RuntimeError):
        raise DataError(
            f"{where}: expected one label a sample, got {_listed(kinds)} of different lengths; "
            "give each sample one class"
        ) from None


def missing(cell: object) -> bool:
    """Return whether a cell of a table is empty."""
    return cell is None or (isinstance(cell, float) and cell != cell)  # NaN


def _listed(kinds: Iterable[type]) -> str:
    return " and ".join(sorted(kind.__name__ for kind in kinds))


def _from_one_hot(where: str, rows: NDArray[Any]) -> NDArray[Any]:
    """Return the place of the 1 in each row."""
    ones = rows.astype(np.float64)
    if not (np.isin(ones, (0, 1)).all() and (ones.sum(1) == 1).all()):
        raise DataError(
            f"{where}: labels {rows.shape} are read as one-hot rows, and some row is not a single "
            "1 among zeros; give each sample one class"
        )
    places: NDArray[Any] = ones.argmax(1)
    return places
