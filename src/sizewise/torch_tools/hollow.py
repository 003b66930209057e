"""Tensors with a shape but no data, so that a training step can be followed without computing it.

    twin, images = remade(model, emptied), emptied(images)
    with HollowMode():
        logits = twin(images)

A hollow tensor says that it is on the CPU, so that torch decides as it would for a real one: which
attention, which norm. What an operation returns depends on shapes, strides and types only. It is
found out once, and remembered: by the real kernel, which costs nothing while tensors are small, or
by torch's fake tensors. Those know all kernels' shapes too, but need ten times as long for each
operation, and take over a second to import.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sizewise.torch_tools.dispatch import DispatchMode

SMALL = 8_000_000
"""Bytes of an operation's inputs up to which the real kernel is asked what it returns.

If their types differ, it is asked in any case.
"""


class NoData(RuntimeError):
    """Something asked for the values of a hollow tensor, or for what cannot be known without."""


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


class Spec(NamedTuple):
    """What a tensor is, but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Hollow(Tensor):
    """A tensor without data.

    Attributes:
        room: Where its elements would be.
    """

    room: Room | torch.UntypedStorage

    @staticmethod
    def __new__(
        cls,
        spec: Spec,
        room: Room | torch.UntypedStorage,
        offset: int = 0,
    ) -> Self:
        """Return a tensor at some place in a room."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, spec.shape, spec.stride, offset, dtype=spec.dtype, device=_CPU
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


_CPU = torch.device("cpu")


def room_of(tensor: Tensor) -> Room | torch.UntypedStorage:
    """Return what holds a tensor's elements, or would, if it is hollow."""
    return tensor.room if isinstance(tensor, Hollow) else tensor.untyped_storage()


def emptied(tensor: Tensor) -> Hollow:
    """Return a hollow tensor of the same shape, strides and type, in a room of its own."""
    spec = _describe(tensor)
    return Hollow(spec, Room(_bytes(spec)))


class HollowMode(DispatchMode):
    """Follows operations on hollow tensors while it is entered; others are computed as usual."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Return what an operation would return, hollow if something in it is."""
        return follow(func, args, kwargs or {})


def follow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation would return, hollow if something in it is."""
    given = list(_tensors(args))
    if kwargs:
        given += _tensors(kwargs.values())
    if not any(isinstance(tensor, Hollow) for tensor in given):
        return func(*args, **kwargs)
    written = _written(func)
    if written is not None:
        # It changes values, of which there are none.
        found = [args[i] if isinstance(i, int) else kwargs[i] for i in written]
        return found[0] if len(found) == 1 else (tuple(found) or None)
    named = tuple((key, _describe(value)) for key, value in kwargs.items())
    known = _results(func, _describe(args), named)
    made: list[Any] = []
    for result in known.results:
        made.append(None if result is None else _make(result, given, made))
    return made[0] if known.kind is None else known.kind(made)


class _Plain(NamedTuple):
    """Anything else; its type beside it, as 1, 1.0 and True are equal but do not do the same."""

    kind: type
    value: Any


class _List(tuple):  # type: ignore[type-arg]
    """Several descriptions."""


@dataclass(frozen=True)
class _Result:
    """A tensor that an operation returns.

    Attributes:
        spec: What it is.
        offset: Where it begins in its room; in a given one, counted from where that tensor begins.
        size: Bytes of its room.
        shares: The number of the tensor whose room it shares: of those given, or, counted from -1
            downwards, of those returned before; None if it has its own.
    """

    spec: Spec
    offset: int
    size: int
    shares: int | None


@dataclass(frozen=True)
class _Results:
    """What an operation returns: one tensor if `kind` is None, else a list or tuple of them."""

    kind: type | None
    results: tuple[_Result | None, ...]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@cache
def _written(func: Any) -> tuple[int | str, ...] | None:
    """Return which arguments an operation changes and returns; None if it returns new tensors."""
    schema = func._schema
    if not schema.is_mutable or any(part.alias_info is None for part in schema.returns):
        return None
    if torch.Tag.inplace_view in func.tags:
        raise NoData(f"{func} changes a shape")
    places: dict[str, int | str] = {}
    for number, argument in enumerate(schema.arguments):
        for name in argument.alias_info.before_set if argument.alias_info else ():
            places[name] = argument.name if argument.kwarg_only else number
    return tuple(places[next(iter(part.alias_info.before_set))] for part in schema.returns)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Spec(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return _List([_describe(item) for item in value])
    return _Plain(type(value), value)


@lru_cache(maxsize=50_000)
def _results(func: Any, args: _List, kwargs: tuple[tuple[str, Any], ...]) -> _Results:
    """Return what an operation returns for arguments that are described."""
    if func is torch.ops.aten.as_strided.default:
        # It alone says where in a room, not where in a tensor; it is too rare to be taught that.
        raise NoData(f"{func} looks beyond its tensor")
    if func.is_view:
        return _observe(func, args, dict(kwargs), torch.device("meta"))
    specs = list(_specs([*args, *(value for _, value in kwargs)]))
    # A norm of bfloat16 with weights of float32 has statistics of a type that only it knows.
    mixed = len({spec.dtype for spec in specs if spec.dtype.is_floating_point}) > 1
    if mixed or sum(map(_bytes, specs)) <= SMALL:
        return _observe(func, args, dict(kwargs), _CPU)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return _observe(func, args, dict(kwargs), _CPU)


def _specs(values: Iterable[Any]) -> Iterator[Spec]:
    for value in values:
        if isinstance(value, Spec):
            yield value
        elif isinstance(value, _List):
            yield from _specs(value)


def _bytes(spec: Spec) -> int:
    if 0 in spec.shape:
        return 0
    last = sum([(n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True)])
    return (last + 1) * spec.dtype.itemsize


def _observe(func: Any, args: _List, kwargs: Mapping[str, Any], device: torch.device) -> _Results:
    """Run an operation on tensors of zeros, and describe what it returns."""
    given: list[Tensor] = []

    def build(value: Any) -> Any:
        if isinstance(value, Spec):
            made = torch.empty_strided(*value[:2], dtype=value.dtype, device=device)
            given.append(made if made.is_meta else made.zero_())
            return given[-1]
        return [build(item) for item in value] if isinstance(value, _List) else value.value

    out = func(*[build(value) for value in args], **{k: build(v) for k, v in kwargs.items()})
    several = isinstance(out, list | tuple)
    results: list[_Result | None] = []
    owners = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(given)}
    for number, tensor in enumerate(out if several else (out,)):
        if tensor is None:
            results.append(None)
            continue
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise NoData(f"{func} returns {type(tensor).__name__}")
        storage = tensor.untyped_storage()
        spec, offset = _describe(tensor), int(tensor.storage_offset())
        shares = owners.setdefault(storage._cdata, -1 - number)
        own = shares == -1 - number
        results.append(_Result(spec, offset, storage.nbytes(), None if own else shares))
    return _Results(type(out) if several else None, tuple(results))


def _make(result: _Result, given: Sequence[Tensor], made: Sequence[Any]) -> Hollow:
    """Return the hollow tensor that a result describes."""
    if result.shares is None:
        return Hollow(result.spec, Room(result.size), result.offset)
    if result.shares < 0:
        return Hollow(result.spec, made[-1 - result.shares].room, result.offset)
    other = given[result.shares]
    return Hollow(result.spec, room_of(other), int(other.storage_offset()) + result.offset)
