"""What sizewise puts into Flower's records: tensors as one plain buffer, everything else as JSON.

Flower sends every array in requests of its own, so all tensors of a record travel in one: the
length of an index (4 bytes, little-endian), the index, then the elements of each tensor. The index
is a JSON list of names, types and shapes, in the order of the elements. It has no offsets, so it
cannot point elsewhere. Nothing can be executed, nothing is parsed before its length is known, and
no tensor is made before all of the index is checked.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from sizewise.common.structure import build
from sizewise.errors import ConfigError, UpdateRefused
from sizewise.flower.identity import Software

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sizewise.exchange.view import Tensors

T = TypeVar("T")

RAW, WHOLE = "raw", "tensors"
"""The kind of the one array of a record of tensors, and its name."""

MOST_DIMENSIONS = 16
LONGEST_TEXT = 10_000_000
"""Characters of JSON that are read at all; a plan or a report has a few thousand."""


@dataclass(frozen=True)
class Announcement:
    """What a node tells about itself, once.

    Attributes:
        device: The number of the device that it is.
        memory: Its bytes; None if its owner did not say.
        own_data: Whether it trains on a folder of its own, not on a share of the common data.
        software: What it runs.
        refusal: Or: why it cannot take part.
    """

    device: int = -1
    memory: int | None = None
    own_data: bool = False
    software: Software = field(default_factory=Software)
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


class Parcel:
    """The tensors of a record, checked but not made yet.

    Attributes:
        index: By name, the type and the shape of each tensor.
        size: The bytes of all of them.
    """

    def __init__(self, record: object) -> None:
        """Read the index; raise UpdateRefused if it is not exactly about the bytes that came."""
        from sizewise.engines.shared_tensors import TYPES

        array = record.get(WHOLE) if isinstance(record, ArrayRecord) and len(record) == 1 else None
        if array is None or array.stype != RAW:
            raise UpdateRefused(f"its tensors are not an array record with one {RAW!r} array")
        start = 4 + int.from_bytes(array.data[:4], "little")
        if not 4 < start <= min(len(array.data), LONGEST_TEXT):
            raise UpdateRefused("its index of tensors is longer than what came, or than is read")
        self.index: dict[str, tuple[torch.dtype, list[int]]] = {}
        self.size = 0
        self._elements = memoryview(array.data)[start:]
        for entry in _entries(array.data[4:start]):
            name, kind, shape = entry
            if name in self.index:
                raise UpdateRefused(f"tensor {name!r:.99} is in its index twice")
            if kind not in TYPES:
                raise UpdateRefused(f"tensor {name!r:.99} is of type {kind!r:.20}")
            self.index[name] = TYPES[kind], shape
            self.size += math.prod(shape) * TYPES[kind].itemsize
        if self.size != len(self._elements):
            raise UpdateRefused(
                f"its index of tensors is about {self.size:,} bytes, and "
                f"{len(self._elements):,} came"
            )

    def tensors(self) -> "dict[str, Tensor]":
        """Return the tensors; each has memory of its own, and can be written to."""
        import torch

        made, end = {}, 0
        for name, (kind, shape) in self.index.items():
            start, end = end, end + math.prod(shape) * kind.itemsize
            if start == end:
                made[name] = torch.empty(shape, dtype=kind)
            else:
                own = bytearray(self._elements[start:end])
                made[name] = torch.frombuffer(own, dtype=kind).reshape(shape)
        return made


def _entries(text: bytes) -> Iterator[tuple[str, str, list[int]]]:
    """Yield the entries of an index; raise UpdateRefused at the first that is none."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise UpdateRefused("its index of tensors is not a JSON list")
    for entry in entries:
        match entry:
            case [str(name), str(kind), list(shape)] if len(shape) <= MOST_DIMENSIONS and all(
                type(n) is int and 0 <= n < 2**48 for n in shape
            ):
                yield name, kind, shape
            case _:
                raise UpdateRefused(f"{entry!r:.99} is no name, type and shape of a tensor")


def pack(tensors: "Tensors") -> ArrayRecord:
    """Return tensors as a record of one array."""
    import torch

    index, parts = [], []
    for name, tensor in tensors.items():
        index.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            parts.append(flat.view(torch.uint8).numpy().data)
    text = json.dumps(index).encode()
    data = b"".join([len(text).to_bytes(4, "little"), text, *parts])
    return ArrayRecord({WHOLE: Array("uint8", (len(data),), RAW, data)})


def unpack(record: object) -> "dict[str, Tensor]":
    """Return a record's tensors; raise UpdateRefused if they are not what their index says."""
    return Parcel(record).tensors()


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
