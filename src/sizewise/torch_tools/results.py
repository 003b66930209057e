"""What operations return, but for values: found out once for each shape, stride and type.

The real kernel is asked, which costs nothing while tensors are small, or torch's fake tensors.
Those know all kernels' shapes too, but need ten times as long for each operation, and take over a
second to import.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_CPU = torch.device("cpu")

SMALL = 8_000_000
"""Bytes of an operation's inputs up to which the real kernel is asked what it returns.

If their types differ, it is asked in any case.
"""

SMALL_ON_META = 32_000_000
"""The same for meta tensors, of which a trial run has a pair of samples: most are weights."""


class NoData(RuntimeError):
    """Something asked for the values of a hollow tensor, or for what cannot be known without."""


class Spec(NamedTuple):
    """What a tensor is, but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = _CPU


class _Plain(NamedTuple):
    """Anything else; its type beside it, as 1, 1.0 and True are equal but do not do the same."""

    kind: type
    value: Any


class _List(tuple):  # type: ignore[type-arg]
    """Several descriptions."""


@dataclass(frozen=True)
class Result:
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
class Results:
    """What an operation returns: one tensor if `kind` is None, else a list or tuple of them."""

    kind: type | None
    results: tuple[Result | None, ...]


def among(values: Iterable[Any], kind: type[T]) -> Iterator[T]:
    """Yield what is of a kind, such as tensors, among an operation's arguments, in order."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, list | tuple):
            yield from among(value, kind)


@cache
def written(func: Any) -> tuple[int | str, ...] | None:
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


def describe(value: Any) -> Any:
    """Return what an argument is, but for values: a `Spec` if it is a tensor.

    Tensors on the meta device stand for some on the CPU.
    """
    if isinstance(value, Tensor):
        device = _CPU if value.is_meta else value.device
        return Spec(tuple(value.shape), value.stride(), value.dtype, device)
    if isinstance(value, list | tuple):
        return _List([describe(item) for item in value])
    return _Plain(type(value), value)


def results_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results:
    """Return what an operation returns.

    Raises:
        NoData: That depends on values, or cannot be described.
    """
    return _results(func, describe(args), _named(kwargs), SMALL)


def _named(kwargs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, describe(value)) for key, value in kwargs.items())


def on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation returns for meta tensors, which have no data.

    Many of torch's meta kernels are written in Python and import its compiler, over a second, when
    they first run. So the real kernel is asked here as well. Torch answers itself wherever that
    could be another answer, so whatever cannot run on meta tensors still fails.
    """
    known = _known_on_meta(func, args, kwargs)
    if known is None:
        return func(*args, **kwargs)
    specs = (result and result.spec for result in known.results)
    made = [s and torch.empty_strided(*s[:2], dtype=s.dtype, device="meta") for s in specs]
    return made[0] if known.kind is None else known.kind(made)


def _known_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Return what an operation returns; None if only torch should say."""
    values = (*args, *kwargs.values())
    given = list(among(values, Tensor))
    if not given or not _plain(func) or any(isinstance(value, torch.device) for value in values):
        return None
    if not all(tensor.is_meta and tensor.layout is torch.strided for tensor in given):
        return None
    if any(map(_channels_last, given)):
        return None  # The real kernel of a convolution keeps that layout, the meta kernel does not.
    if sum(tensor.nbytes for tensor in given) > SMALL_ON_META:
        return None
    try:
        known = _results(func, describe(args), _named(kwargs), SMALL_ON_META)
    except Exception:
        return None  # The meta kernel may know; else its error is the one to show.
    return known if all(r is None or r.shares is None for r in known.results) else None


def _channels_last(tensor: Tensor) -> bool:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.ndim not in layouts or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=layouts[tensor.ndim])


_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@cache
def _plain(func: Any) -> bool:
    """Tell whether an operation returns new tensors whose shapes do not depend on values."""
    fresh = not func._schema.is_mutable and not func.is_view
    return fresh and not _BY_VALUES.intersection(func.tags)


@lru_cache(maxsize=50_000)
def _results(func: Any, args: _List, kwargs: tuple[tuple[str, Any], ...], small: int) -> Results:
    """Return what an operation returns for arguments that are described.

    Up to so many bytes of them, the real kernel is asked.
    """
    if func is torch.ops.aten.as_strided.default:
        # It alone says where in a room, not where in a tensor; it is too rare to be taught that.
        raise NoData(f"{func} looks beyond its tensor")
    if func.is_view:
        return _observe(func, args, dict(kwargs), torch.device("meta"))
    specs = list(among((args, kwargs), Spec))
    # A norm of bfloat16 with weights of float32 has statistics of a type that only it knows.
    mixed = len({spec.dtype for spec in specs if spec.dtype.is_floating_point}) > 1
    if mixed or sum(map(size_of, specs)) <= small:
        return _observe(func, args, dict(kwargs))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return _observe(func, args, dict(kwargs))


def size_of(spec: Spec) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if 0 in spec.shape:
        return 0
    last = sum([(n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True)])
    return (last + 1) * spec.dtype.itemsize


def _observe(
    func: Any, args: _List, kwargs: Mapping[str, Any], device: torch.device | None = None
) -> Results:
    """Run an operation on tensors of zeros, and describe what it returns.

    On another device than theirs, results are where the first of the tensors should be.
    """
    given: list[Tensor] = []

    def build(value: Any) -> Any:
        if isinstance(value, Spec):
            made = torch.empty_strided(*value[:2], dtype=value.dtype, device=device or value.device)
            given.append(made if made.is_meta else made.zero_())
            return given[-1]
        return [build(item) for item in value] if isinstance(value, _List) else value.value

    built = [build(value) for value in args], {key: build(v) for key, v in kwargs.items()}
    # An operation that draws must not move the numbers that somebody else draws next.
    draws = torch.Tag.nondeterministic_seeded in func.tags
    with torch.random.fork_rng(devices=[]) if draws else nullcontext():
        out = func(*built[0], **built[1])
    several = isinstance(out, list | tuple)
    results: list[Result | None] = []
    owners = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(given)}
    for number, tensor in enumerate(out if several else (out,)):
        if tensor is None:
            results.append(None)
            continue
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise NoData(f"{func} returns {type(tensor).__name__}")
        storage = tensor.untyped_storage()
        spec, offset = describe(tensor), int(tensor.storage_offset())
        if device is not None:
            spec = spec._replace(device=next(among((args, kwargs), Spec)).device)
        shares = owners.setdefault(storage._cdata, -1 - number)
        own = shares == -1 - number
        results.append(Result(spec, offset, storage.nbytes(), None if own else shares))
    given.clear()  # `build` refers to itself, and would keep them until garbage is collected.
    return Results(type(out) if several else None, tuple(results))
