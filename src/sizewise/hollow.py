"""Tensors with a shape but no data, so that a training step can be followed without computing it.

    with HollowMode():
        twin = remade(model, emptied)
        logits = twin(Hollow(torch.empty(32, 3, 8, 8, device="meta")))

A hollow tensor says that it is on the CPU, so that torch decides as it would for a real one: which
attention, which norm. What an operation returns depends on shapes, strides and types only. It is
found out once, and remembered: by the real kernel, which costs nothing while tensors are small, or
by torch's fake tensors. Those know all kernels' shapes too, but need ten times as long for each
operation, and take over a second to import.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from sizewise.dispatch import DispatchMode

SMALL = 8_000_000
"""Bytes of an operation's inputs up to which the real kernel is asked what it returns."""


class NoData(RuntimeError):
    """Something asked for the values of a hollow tensor, or for what cannot be known without."""


class Hollow(Tensor):
    """A tensor without data.

    Attributes:
        outline: Its shape, strides and type, on the meta device. Views share its storage, as views
            of real tensors do.
    """

    outline: Tensor

    @staticmethod
    def __new__(cls, outline: Tensor, learns: bool = False) -> Self:
        """Return a tensor like one on the meta device."""
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            outline.shape,
            outline.stride(),
            outline.storage_offset(),
            dtype=outline.dtype,
            device=torch.device("cpu"),
            requires_grad=learns,
        )
        made.outline = outline
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: there is nothing to compute with."""
        raise NoData(f"{func} met a tensor without data outside of a HollowMode")

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"Hollow({tuple(self.shape)}, {self.dtype})"


class HollowMode(DispatchMode):
    """Follows operations on hollow tensors while it is entered; others are computed as usual."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Return what an operation would return, hollow if something in it is."""
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        if not any(isinstance(tensor, Hollow) for tensor in _tensors(given)):
            return func(*args, **kwargs)
        if func.is_view:
            views = func(*map(_outline, args), **{k: _outline(v) for k, v in kwargs.items()})
            return [*map(Hollow, views)] if isinstance(views, list | tuple) else Hollow(views)
        written = _written(func)
        if written is not None:
            # It changes values, of which there are none.
            found = [args[i] if isinstance(i, int) else kwargs[i] for i in written]
            return found[0] if len(found) == 1 else (tuple(found) or None)
        known = _results(func, _describe(args), tuple((k, _describe(v)) for k, v in kwargs.items()))
        tensors = list(_tensors(given))
        made: list[Any] = []
        for result in known.results:
            made.append(_make(result, tensors, made))
        if known.kind is None:
            return made[0]
        return known.kind(made)


def emptied(tensor: Tensor) -> Tensor:
    """Return a hollow tensor of the same shape, strides and type."""
    shape, stride = tensor.shape, tensor.stride()
    return Hollow(torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta"))


def clone(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values, and no history."""
    return tensor.detach().clone()


def remade(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module whose tensors are made from those of the module, one by one."""
    constants = (*module.buffers(), *plain_tensors(module))
    memo: dict[int, Any] = {id(tensor): make(tensor) for tensor in constants}
    for parameter in module.parameters():
        memo[id(parameter)] = as_parameter(make(parameter), parameter.requires_grad)
    layers = list(module.modules())
    if not any(hasattr(layer, "__deepcopy__") for layer in layers):
        # The same as `deepcopy` would do, which spends most of its time on empty tables of hooks.
        memo |= {id(layer): object.__new__(type(layer)) for layer in layers}
        for layer in layers:
            vars(memo[id(layer)]).update({k: _copied(v, memo) for k, v in vars(layer).items()})
    return copy.deepcopy(module, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict | set) and not value and id(value) not in memo:
        memo[id(value)] = type(value)()
    return copy.deepcopy(value, memo)


def as_parameter(tensor: Tensor, learns: bool = True) -> nn.Parameter:
    """Return a tensor as a parameter."""
    if not isinstance(tensor, Hollow):
        return nn.Parameter(tensor, learns)
    made: Any = Hollow(tensor.outline, learns)
    made._is_param = True  # What torch knows a parameter of another class by.
    return made  # type: ignore[no-any-return]


def plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that a module holds as plain attributes, neither parameter nor buffer."""
    for layer in module.modules():
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor))


class _Spec(NamedTuple):
    """What a tensor is, but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


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
        offset: Where it begins in its storage.
        size: Bytes of its storage.
        shares: The number of the tensor whose storage it shares: of those given, or, counted from
            -1 downwards, of those returned before; None if it has its own.
    """

    spec: _Spec
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


def _outline(value: Any) -> Any:
    return value.outline if isinstance(value, Hollow) else value


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
        return _Spec(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return _List(map(_describe, value))
    return _Plain(type(value), value)


@lru_cache(maxsize=50_000)
def _results(func: Any, args: _List, kwargs: tuple[tuple[str, Any], ...]) -> _Results:
    """Return what an operation returns for arguments that are described."""
    size = sum(map(_bytes, _specs([*args, *(value for _, value in kwargs)])))
    if size <= SMALL:
        return _observe(func, args, dict(kwargs))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return _observe(func, args, dict(kwargs))


def _specs(values: Iterable[Any]) -> Iterator[_Spec]:
    for value in values:
        if isinstance(value, _Spec):
            yield value
        elif isinstance(value, _List):
            yield from _specs(value)


def _bytes(spec: _Spec) -> int:
    last = sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
    return 0 if 0 in spec.shape else (last + 1) * spec.dtype.itemsize


def _observe(func: Any, args: _List, kwargs: Mapping[str, Any]) -> _Results:
    """Run an operation on tensors of zeros, and describe what it returns."""
    given: list[Tensor] = []

    def build(value: Any) -> Any:
        if isinstance(value, _Spec):
            given.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype).zero_())
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


def _make(result: _Result | None, given: Sequence[Tensor], made: Sequence[Any]) -> Any:
    """Return the hollow tensor that a result describes."""
    if result is None:
        return None
    spec, offset = result.spec, result.offset
    if result.shares is not None:
        # What was given may begin anywhere in its storage; it was observed at the beginning.
        other = given[result.shares] if result.shares >= 0 else made[-1 - result.shares]
        offset += int(other.storage_offset()) if result.shares >= 0 else 0
        return Hollow(_outline(other).as_strided(spec.shape, spec.stride, offset))
    if result.size == _bytes(spec):
        return Hollow(torch.empty_strided(*spec[:2], dtype=spec.dtype, device="meta"))
    whole = torch.empty(result.size // spec.dtype.itemsize, dtype=spec.dtype, device="meta")
    return Hollow(whole.as_strided(spec.shape, spec.stride, offset))
