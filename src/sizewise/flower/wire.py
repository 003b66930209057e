"""What sizewise puts into Flower's records: tensors as plain buffers, everything else as JSON.

A tensor is an array of stype "raw": its elements in order, little-endian, with their type and shape
beside them. Nothing in it can be executed, and nothing is parsed before its length is known.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from sizewise.common.structure import build
from sizewise.errors import ConfigError, UpdateRefused

if TYPE_CHECKING:
    from torch import Tensor

    from sizewise.exchange.view import Tensors

T = TypeVar("T")

RAW = "raw"
LONGEST_TEXT = 10_000_000
"""Characters of JSON that are read at all; a plan or a report has a few thousand."""


@dataclass(frozen=True)
class Announcement:
    """What a node tells about itself, once.

    Attributes:
        device: The number of the device that it is.
        memory: Its bytes; None if its owner did not say.
        own_data: Whether it trains on a folder of its own, not on a share of the common data.
        refusal: Or: why it cannot take part.
    """

    device: int = -1
    memory: int | None = None
    own_data: bool = False
    refusal: str | None = None


@dataclass(frozen=True)
class Report:
    """What a node sends beside its tensors.

    Attributes:
        round: The round of the plan that it followed.
        device: The device of that plan.
        plan: The hash of the plan's text.
        refusal: Why it did not train; all that follows is then left out.
        samples: See `Update`, as for the next five.
        steps: Optimiser steps.
        loss: Mean training loss.
        peak_bytes: Metered peak.
        seconds: Time it took.
        rows: Rows sent of some tensors.
        memory: The hash of what it now remembers; "" is nothing.
        forgot: Whether it no longer had what the server thought that it remembers.
    """

    round: int
    device: int
    plan: str
    refusal: str | None = None
    samples: int = 0
    steps: int = 0
    loss: float = 0.0
    peak_bytes: int | None = None
    seconds: float = 0.0
    rows: Mapping[str, Any] = field(default_factory=dict)
    memory: str = ""
    forgot: bool = False


def pack(tensors: "Tensors") -> ArrayRecord:
    """Return tensors as a record."""
    return ArrayRecord({name: _array(tensor) for name, tensor in tensors.items()})


def _array(tensor: "Tensor") -> Array:
    import torch

    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return Array(kind, shape, RAW, flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"")


def weight(record: ArrayRecord) -> int:
    """Return the bytes of a record's tensors."""
    return sum(len(array.data) for array in record.values())


def unpack(record: ArrayRecord) -> "dict[str, Tensor]":
    """Return a record's tensors; raise UpdateRefused if one is not what it says it is."""
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> "Tensor":
    import torch

    from sizewise.engines.shared_tensors import TYPES

    kind, shape = TYPES.get(array.dtype), array.shape
    if array.stype != RAW or kind is None:
        raise UpdateRefused(f"tensor {name!r:.99} is {array.stype!r:.20} of {array.dtype!r:.20}")
    count = math.prod(shape) if all(type(n) is int and n >= 0 for n in shape) else -1
    if count * kind.itemsize != len(array.data):
        raise UpdateRefused(
            f"tensor {name!r:.99} has {len(array.data):,} bytes, which do not make a {array.dtype} "
            f"of shape {shape!r:.99}"
        )
    if count == 0:
        return torch.empty(shape, dtype=kind)
    # A copy: torch would warn about memory that it must not write to.
    return torch.frombuffer(bytearray(array.data), dtype=kind).reshape(shape)


def write(value: Mapping[str, Any]) -> ConfigRecord:
    """Return plain values as a record of JSON."""
    return ConfigRecord({"json": json.dumps(value)})


def read(content: RecordDict, name: str) -> dict[str, Any]:
    """Return the plain values of a record; raise UpdateRefused if it holds something else."""
    record = content.get(name)
    text = record.get("json") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise UpdateRefused(f"its record {name!r} is missing, or no text of reasonable length")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UpdateRefused(f"its record {name!r} is not a JSON object")
    return value


def read_as(kind: type[T], content: RecordDict, name: str) -> T:
    """Return a record as a dataclass; raise UpdateRefused if it does not fit."""
    try:
        return build(kind, read(content, name), name)
    except ConfigError as error:
        raise UpdateRefused(str(error)) from None
