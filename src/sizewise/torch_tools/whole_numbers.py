"""Whole numbers and truth values that a run without data knows all the same.

A forward may decide by positions that it has counted itself, as the causal masks of transformers
do. Such numbers depend on shapes only, so they are computed beside the tensors without data. Token
ids that a model is given are made up; what is asked about them is answered with no, or with yes, so
that both can be tried. What depends on weights or features cannot be known.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from sizewise.torch_tools.results import among

LARGEST = 1_000_000
"""Entries up to which a tensor's values are worked out."""

_QUESTIONS = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})


class WholeNumbers:
    """The values of tensors of whole numbers, as far as they can be known.

    Attributes:
        made_up: What token ids, and other whole numbers that nobody computed, are taken to be; and
            the answer, as yes or no, to whatever depends on them.
        guessed: Whether there was such an answer.
    """

    def __init__(self, made_up: int = 0) -> None:
        self.made_up, self.guessed = made_up, False
        # Beside its values, whether a tensor depends on what was made up.
        self._known: MutableMapping[Tensor, tuple[Tensor, bool]] = WeakTensorKeyDictionary()
        self._unknown: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()

    def answer(self, func: Any, args: Sequence[Any]) -> Any:
        """Return what Python is told about a tensor's values; None if that cannot be known."""
        if _name(func) not in _QUESTIONS or not self._can_be_known(args):
            return None
        values, made_up = self._values(args)
        found = func(*values)
        if not made_up:
            return found
        # Yes or no can be tried both ways; any other number would be a guess among many.
        self.guessed = True
        return bool(self.made_up) if isinstance(found, bool) else None

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Work out the values that an operation gives, after it ran without data."""
        results = [t for t in among([out], Tensor) if t.is_meta and _whole(t)]
        if not results:
            return
        if not self._can_be_known((*args, *kwargs.values())) or not _computes(func):
            rooms = {tensor.untyped_storage()._cdata for tensor in results}
            if func._schema.is_mutable:  # What shares its room changes with it.
                results += [t for t in self._known if t.untyped_storage()._cdata in rooms]
            for tensor in results:
                self._known.pop(tensor, None)
                self._unknown[tensor] = True
            return
        there = {key: value for key, value in kwargs.items() if key != "device"}
        (given, named), made_up = self._values((args, there))
        try:
            found = func(*given, **named, **({"device": "cpu"} if "device" in kwargs else {}))
        except (RuntimeError, TypeError, ValueError, IndexError):
            found, made_up = [self._make_up(tensor) for tensor in results], True
        for tensor, values in zip(results, among([found], Tensor), strict=False):
            self._known[tensor] = values, made_up

    def _can_be_known(self, values: Any) -> bool:
        given = list(among(values, Tensor))
        return all(_whole(t) and t not in self._unknown for t in given)

    def _make_up(self, tensor: Tensor) -> Tensor:
        return torch.full(tensor.shape, self.made_up, device="cpu").to(tensor.dtype)

    def _values(self, tree: Any) -> tuple[Any, bool]:
        """Return arguments with values in place of tensors, and whether some are made up."""
        made_up = False

        def value(leaf: Any) -> Any:
            nonlocal made_up
            if not isinstance(leaf, Tensor) or not leaf.is_meta:
                return leaf
            if leaf not in self._known:
                self._known[leaf] = self._make_up(leaf), True
            values, guess = self._known[leaf]
            made_up |= guess
            return values

        return tree_map(value, tree), made_up


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _whole(tensor: Tensor) -> bool:
    exact = not tensor.is_floating_point() and not tensor.is_complex()
    return exact and tensor.numel() <= LARGEST


def _computes(func: Any) -> bool:
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    return not drawn and "empty" not in _name(func)
