"""Tensors with a shape but no data, so that a training step can be followed without computing it.

    twin, images = remade(model, emptied), emptied(images)
    with HollowMode():
        logits = twin(images)

A hollow tensor says where it would be, so that torch decides as it would for a real one: which
attention, which norm. What an operation returns depends on shapes, strides and types only, and is
found out once; see `results`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sizewise.torch_tools.dispatch import DispatchMode
from sizewise.torch_tools.results import (
    NoData,
    Result,
    Spec,
    among,
    describe,
    results_of,
    size_of,
    written,
)

__all__ = ["Hollow", "HollowMode", "NoData", "Room", "emptied", "follow", "room_of"]


class Room:
    """Stands for a storage: views share it, and it dies with the last tensor in it."""

    __slots__ = ("__weakref__", "size")

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def _cdata(self) -> int:
        return id(self)

    def nbytes(self) -> int:
        """Return its bytes."""
        return self.size


class Hollow(Tensor):
    """A tensor without data, and the room where its elements would be."""

    room: Room | torch.UntypedStorage

    @staticmethod
    def __new__(cls, spec: Spec, room: Room | torch.UntypedStorage, offset: int = 0) -> Self:
        """Return a tensor at some place in a room."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, spec.shape, spec.stride, offset, dtype=spec.dtype, device=spec.device
        )
        made.room = room
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: there is nothing to compute with."""
        raise NoData(f"{func} met a tensor without data outside of a HollowMode")

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"Hollow({tuple(self.shape)}, {self.dtype})"


def room_of(tensor: Tensor) -> Room | torch.UntypedStorage:
    """Return what holds a tensor's elements, or would, if it is hollow."""
    return tensor.room if isinstance(tensor, Hollow) else tensor.untyped_storage()


def emptied(tensor: Tensor, device: torch.device | None = None) -> Hollow:
    """Return a hollow tensor of the same shape, strides and type, in a room of its own.

    It says that it is on the device given; default: that of the tensor, for meta tensors the CPU.
    """
    spec = describe(tensor)
    if device is not None:
        spec = spec._replace(device=device)
    return Hollow(spec, Room(size_of(spec)))


class HollowMode(DispatchMode):
    """Follows operations on hollow tensors while it is entered; others are computed as usual."""

    def _operate(self, func: Any, args: Any, kwargs: Any) -> object:
        return follow(func, args, kwargs)


def follow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation would return, hollow if something in it is."""
    given = list(among((*args, *kwargs.values()), Tensor))
    if not any(isinstance(tensor, Hollow) for tensor in given):
        return func(*args, **kwargs)
    places = written(func)
    if places is not None:
        # It changes values, of which there are none.
        found = [args[i] if isinstance(i, int) else kwargs[i] for i in places]
        return found[0] if len(found) == 1 else (tuple(found) or None)
    known = results_of(func, args, kwargs)
    made: list[Any] = []
    for result in known.results:
        made.append(result and _make(result, given, made))
    return made[0] if known.kind is None else known.kind(made)


def _make(result: Result, given: Sequence[Tensor], made: Sequence[Any]) -> Hollow:
    """Return the hollow tensor that a result describes."""
    if result.shares is None:
        return Hollow(result.spec, Room(result.size), result.offset)
    if result.shares < 0:
        return Hollow(result.spec, made[-1 - result.shares].room, result.offset)
    other = given[result.shares]
    return Hollow(result.spec, room_of(other), int(other.storage_offset()) + result.offset)
