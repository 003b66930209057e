"""What a step's bytes depend on, as a value that can be compared."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

_ATOMS = frozenset({bool, int, str, type(None)})


def fingerprint(value: Any, seen: dict[int, int]) -> Hashable:
    """Return a value that is equal for modules, steps and batches that need the same bytes.

    Args:
        value: Any of them, or a structure of them.
        seen: Numbers of the tensors, modules and records that were met, by their identity; empty
            at first.

    Raises:
        TypeError: Something in it cannot be compared.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value  # type: ignore[no-any-return]
    if kind in (dict, OrderedDict) and not value:
        return ()  # A table of hooks; every layer has a dozen.
    if isinstance(value, Tensor | nn.Module) or _is_record(kind):
        # The number tells tied weights and shared layers from equal ones.
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        if isinstance(value, Tensor):
            # A step that looks at values may take another way where there are none.
            return value.dtype, value.shape, value.stride(), value.is_meta
        return type(value), fingerprint(vars(value), seen)
    if isinstance(value, partial):
        return fingerprint((value.func, value.args, value.keywords), seen)
    if isinstance(value, Mapping):
        # Most are whole numbers and words, or empty: asking is cheaper than a call for each.
        return tuple(
            [
                (key, item if type(item) in _ATOMS else fingerprint(item, seen))
                for key, item in value.items()
            ]
        )
    if isinstance(value, list | tuple):
        return tuple(fingerprint(item, seen) for item in value)
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, MethodType):
        # Its answer may depend on its object, and a cache must not keep that alive.
        raise TypeError("a bound method has no fingerprint")
    return value  # type: ignore[no-any-return]


def _is_record(kind: type) -> bool:
    """Return whether a class is a dataclass that may change, such as the config of a transformer.

    Two of them are equal if what they hold is; what they hold is looked at now.
    """
    return is_dataclass(kind) and kind.__hash__ is None
