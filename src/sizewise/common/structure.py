"""Plain mappings to frozen dataclasses and back, with errors that name the key.

The same few lines read a TOML config, check a method's options and carry plans between processes.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, TypeVar, get_args, get_origin

from sizewise.errors import ConfigError

T = TypeVar("T")

Bytes = Annotated[int, "bytes"]
"""An amount of memory: an integer, or text such as "20MB" (10^6) or "20MiB" (2^20) in a config."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_bytes(value: object, where: str = "memory") -> int:
    """Return an amount of memory in bytes; it must be positive."""
    amount: float | Fraction = 0
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMG]I?)?B?\s*", value.upper())
        if match:
            amount = Fraction(match[1]) * _UNITS[match[2] or ""]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        amount = value
    if not 1 <= amount < float("inf"):
        raise ConfigError(
            f"{where} must be a positive amount of memory such as 20000000, "
            f'"20MB" or "20MiB", not {value!r}'
        )
    return int(amount)


def format_bytes(amount: float) -> str:
    """Return bytes for people, in decimal units: 1_234_567 is 1.23 MB."""
    return _in_units(amount, (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1)))


def format_flops(amount: float) -> str:
    """Return floating-point operations for people: 1_234_567 is 1.23 MFLOP."""
    units = (("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6))
    return _in_units(amount, (*units, ("FLOP", 1)))


def _in_units(amount: float, units: Sequence[tuple[str, int]]) -> str:
    # What would be rounded to 1000 of a unit is 1 of the next.
    unit, size = next((u for u in units if amount >= 0.9995 * u[1]), units[-1])
    scaled = amount / size
    return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:,.0f} {unit}"


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" or the list of choices, to end a sentence about a bad word."""
    choices = sorted(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose one of {', '.join(choices)}" if choices else "it takes no keys"


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Return a dataclass made from a mapping, checking every key and type on the way down.

    Error messages name the dotted path of a value, which begins with `where`.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a table, not {values!r}")
    kinds = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields if field.init]
    for key in values:
        if key not in names:
            raise ConfigError(f"unknown key {_join(where, key)!r}; {nearest(key, names)}")
    chosen = {k: _convert(kinds[k], v, _join(where, k)) for k, v in values.items()}
    missing = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in chosen
    ]
    if missing:
        raise ConfigError(f"{_join(where, missing[0])!r} is missing; give it a value")
    return cls(**chosen)


def plain(value: Any) -> Any:
    """Return dataclasses as dicts and tuples as lists; fields that are None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables, as dotted paths, and their values."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _convert(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as type `kind`, or raise a ConfigError that names `where`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return parse_bytes(value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(f"{where} cannot be {value!r}; {nearest(str(value), arguments)}")
        return value
    if origin is tuple and isinstance(value, str) and get_origin(arguments[0]) is typing.Literal:
        value = [value]  # One word stands for a list of it.
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return dict(value)
    if origin is None and dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (
        isinstance(kind, type)
        and isinstance(value, kind)
        and (kind is bool) == isinstance(value, bool)
    ):
        return value
    raise ConfigError(f"{where} must be {_describe(kind)}, not {value!r}")


def _describe(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) in (dict, Mapping):
        return "a table"
    return words.get(kind, str(kind))
