"""Robust merging over whoever covers each entry.

All updates of a round are kept until the last has come: these rules cannot stream. With K(e) the
devices whose pieces hold an entry e of the server's tensors:

- By entry (median, trimmed mean): the rule sees the values of K(e), and of nobody else.
- By vector (Krum, geometric median): the entries that the same devices cover form a block, over all
  tensors. On a block all of its devices have vectors of equal length, and the rule is applied there
  as it was published, with that many devices. Devices are compared on just the entries that are
  decided about: a large device that is honest where many watch gains nothing where few do.

Where too few devices cover an entry for the rule to hold, it keeps its value, or is merged as well
as can be (`recipe.merge_thin`). Devices count the same: how many samples it has, a device says
itself. Tensors that nobody moved keep their bits; of counters, the furthest counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.view import Tensors, TensorSlice, View, grid

CHUNK = 1 << 16
"""Values that are sorted or multiplied at a time; it bounds what a rule needs beside the stack."""

ByEntry = Callable[[Tensor, Tensor], Tensor]
"""From values (n, e) in ascending order, and how many each entry has, (e,), to one for each."""

ByVector = Callable[[Tensor], Tensor]
"""From the Gram matrix of changes, float64 (n, n), to each device's share, (n,)."""


@dataclass(frozen=True)
class _Piece:
    """What one device sent of one server tensor."""

    device: int
    place: TensorSlice
    values: Tensor


@dataclass(frozen=True)
class _Stack:
    """What devices sent of one server tensor, side by side.

    Attributes:
        devices: Their numbers in the round, n of them.
        held: bool (n, ...): which entries they sent; of size 1 along dimensions that nobody cut.
        values: (n, *shape); entries that a device did not send hold a filler.
    """

    devices: list[int]
    held: Tensor
    values: Tensor

    @property
    def flat(self) -> Tensor:
        """The values as (n, entries)."""
        return self.values.view(len(self.devices), self.values[0].numel())


class RobustMerge(ABC):
    """Keeps updates, then merges them tensor by tensor."""

    def __init__(self, tensors: Tensors, needed: int = 1) -> None:
        """Begin a round.

        Args:
            tensors: The server's tensors.
            needed: Entries that fewer devices cover keep their values.
        """
        self._tensors, self._needed = tensors, needed
        self._counters = CoverageMean(tensors)
        self._pieces: dict[str, list[_Piece]] = {}
        self._moved: set[str] = set()
        self._devices = 0

    def add(self, update: Tensors, view: View, weight: float) -> None:
        """Keep one update: trained tensors by local name, and where they live."""
        for local, tensor in update.items():
            place = view[local]
            if not self._tensors[place.name].is_floating_point():
                self._counters.add({local: tensor}, view, weight)
                continue
            self._pieces.setdefault(place.name, []).append(_Piece(self._devices, place, tensor))
            known = place.name in self._moved
            if not known and not torch.equal(place.read(self._tensors), tensor):
                self._moved.add(place.name)
        self._devices += 1

    def covered(self, name: str) -> bool | Tensor:
        """Return whether enough devices cover a tensor; where that differs, which entries."""
        if name not in self._pieces:
            return False
        enough = self._held(name).sum(dim=0) >= self._needed
        if bool(enough.all()) or not bool(enough.any()):
            return bool(enough.any())
        return enough.expand(self._tensors[name].shape)

    def result(self) -> dict[str, Tensor]:
        """Return all server tensors: merged where enough devices cover them, else the old ones."""
        merged = self._counters.result()
        for name in self._moved:
            if (covered := self.covered(name)) is not False:
                found = self._merged(name)
                old = self._tensors[name]
                merged[name] = found if covered is True else torch.where(covered, found, old)
        return merged

    @abstractmethod
    def _merged(self, name: str) -> Tensor:
        """Return what becomes of a tensor; what it says of entries that nobody sent is unused."""

    def _owners(self, name: str) -> list[int]:
        return list(dict.fromkeys(piece.device for piece in self._pieces[name]))

    def _held(self, name: str) -> Tensor:
        """Return which entries of a tensor each of its devices sent, as in `_Stack`."""
        shape, pieces, owners = self._tensors[name].shape, self._pieces[name], self._owners(name)
        indices = [piece.place.index for piece in pieces if piece.place.index is not None]
        cut = [any(not _is_all(index[dim]) for index in indices) for dim in range(len(shape))]
        small = torch.Size(size if cut[dim] else 1 for dim, size in enumerate(shape))
        held = torch.zeros((len(owners), *small), dtype=torch.bool)
        for piece in pieces:
            index = piece.place.index or (slice(None),) * len(shape)
            parts = tuple(part if cut[dim] else slice(None) for dim, part in enumerate(index))
            held[owners.index(piece.device)][grid(parts, small)] = True
        return held

    def _stack(self, name: str, filler: float) -> _Stack:
        old, owners = self._tensors[name], self._owners(name)
        values = old.new_full((len(owners), *old.shape), filler)
        for piece in self._pieces[name]:
            index = piece.place.index
            at = ... if index is None else grid(index, old.shape)
            values[owners.index(piece.device)][at] = piece.values
        return _Stack(owners, self._held(name), values)


class MergeByEntry(RobustMerge):
    """Applies a rule to the values of every entry.

    Example:
        >>> from sizewise.exchange.robust_rules import median
        >>> merge = MergeByEntry({"w": torch.zeros(2)}, median)
        >>> for value in (1.0, 2.0, 9.0):
        ...     merge.add({"w": torch.full((2,), value)}, {"w": TensorSlice("w")}, weight=1.0)
        >>> merge.result()["w"]
        tensor([2., 2.])
    """

    def __init__(self, tensors: Tensors, rule: ByEntry, needed: int = 1) -> None:
        super().__init__(tensors, needed)
        self._rule = rule

    def _merged(self, name: str) -> Tensor:
        stack, old = self._stack(name, torch.inf), self._tensors[name]
        # What nobody sent is infinite, and so comes last; the rule looks at the first ones only.
        count = stack.held.sum(dim=0, dtype=torch.int32).expand(old.shape).reshape(-1)
        values, merged = stack.flat, old.new_empty(old.numel())
        for part in _parts(*values.shape):
            ordered = values[:, part].sort(dim=0).values
            merged[part] = self._rule(ordered, count[part].long().clamp(min=1))
        return merged.view(old.shape)


class MergeByVector(RobustMerge):
    """Applies a rule to every block: the entries, of all tensors, that the same devices cover."""

    def __init__(self, tensors: Tensors, rule: ByVector, needed: int = 1) -> None:
        super().__init__(tensors, needed)
        self._rule = rule
        self._shares: dict[tuple[int, ...], Tensor] = {}

    def result(self) -> dict[str, Tensor]:
        """Return all server tensors, as the base class does: devices are compared first."""
        self._shares = {block: self._rule(gram) for block, gram in self._grams().items()}
        return super().result()

    def _grams(self) -> dict[tuple[int, ...], Tensor]:
        """Return the inner products of the devices' changes, for each block."""
        grams: dict[tuple[int, ...], Tensor] = {}
        for name in sorted(self._moved):
            stack, old = self._stack(name, 0.0), self._tensors[name].reshape(-1)
            blocks, block_of = _blocks(stack)
            entries = torch.split(block_of.argsort(), block_of.bincount().tolist())
            for block, own in zip(blocks, entries, strict=True):
                rows = torch.tensor([stack.devices.index(k) for k in block], dtype=torch.int64)
                for part in _parts(len(block), len(own)) if block else ():
                    at = own[part]
                    changes = stack.flat[rows[:, None], at].double() - old[at].double()
                    product = changes @ changes.T
                    grams[block] = grams[block] + product if block in grams else product
        # A product of matrices need not be symmetric to the last bit.
        return {block: (gram + gram.T) / 2 for block, gram in grams.items()}

    def _merged(self, name: str) -> Tensor:
        stack, old = self._stack(name, 0.0), self._tensors[name]
        blocks, block_of = _blocks(stack)
        shares = torch.zeros(len(stack.devices), len(blocks), dtype=torch.float64)
        for number, block in enumerate(blocks):
            if block:
                shares[[stack.devices.index(k) for k in block], number] = self._shares[block]
        merged = torch.zeros_like(old)
        for values, of_device in zip(stack.values, shares.to(old.dtype), strict=True):
            merged += values * of_device[block_of].view(old.shape)
        return merged


def _blocks(stack: _Stack) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return the different sets of devices that cover entries, and which one each entry has.

    The second is int64, with one number for each entry of the tensor, in one dimension.
    """
    held = stack.held.view(len(stack.devices), -1)
    number = torch.zeros(held.shape[1], dtype=torch.int64)
    for row in held:
        # Numbers that differ in any device so far; renumbered, so that they never overflow.
        number = torch.unique(2 * number + row, return_inverse=True)[1]
    example = torch.zeros(int(number.max()) + 1, dtype=torch.int64)
    example[number] = torch.arange(len(number))
    blocks = [
        tuple(device for device, holds in zip(stack.devices, column, strict=True) if holds)
        for column in held[:, example].T.tolist()
    ]
    shape = stack.values.shape[1:]
    return blocks, number.view(stack.held.shape[1:]).expand(shape).reshape(-1)


def _parts(devices: int, entries: int) -> Iterator[slice]:
    """Yield slices of a tensor's entries, few enough for each step's scratch."""
    step = max(1, CHUNK // devices)
    for start in range(0, entries, step):
        yield slice(start, start + step)


def _is_all(part: slice | Tensor) -> bool:
    return isinstance(part, slice) and part == slice(None)
