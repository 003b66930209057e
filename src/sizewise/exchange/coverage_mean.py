"""The mean, streaming, over whoever covers each entry: how updates are merged by default.

For every scalar entry e of the server's tensors, with K(e) the updates that hold e:

    theta_e <- sum_{k in K(e)} w_k theta_e^k / sum_{k in K(e)} w_k     where K(e) is not empty
    theta_e <- theta_e                                                 elsewhere

A tensor that every device sends back as it was, because nothing in it learns, keeps its bits too:
the mean of equal numbers is rounded, and by how much depends on the CPU.

Updates are added one by one and can be forgotten at once, so memory is O(model), however many
devices report. The order of adding decides the rounding; the federation adds in plan order.
"""

import numpy as np
import torch
from torch import Tensor

from sizewise.exchange.view import Index, Tensors, TensorSlice, View, grid, slices


class CoverageMean:
    """Adds up updates and gives the mean of what was covered.

    Example:
        >>> mean = CoverageMean({"w": torch.zeros(3)})
        >>> mean.add({"w": torch.ones(2)}, {"w": TensorSlice("w", (slice(0, 2),))}, weight=5.0)
        >>> mean.result()["w"]
        tensor([1., 1., 0.])
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, EntryWeights] = {}
        self._moved: set[str] = set()

    def add(self, update: Tensors, view: View, weight: float) -> None:
        """Add one update with the given positive weight.

        Args:
            update: Trained tensors by local name. Tensors that the device only read are not in it
                and so do not count as covered.
            view: Where those tensors live on the server.
            weight: How much this update counts.
        """
        for local, tensor in update.items():
            self._add_tensor(view[local], tensor, weight)

    def _add_tensor(self, place: TensorSlice, tensor: Tensor, weight: float) -> None:
        old = self._tensors[place.name]
        if not old.is_floating_point():
            # Counters such as num_batches_tracked: the furthest one is the useful one.
            best = self._sums.setdefault(place.name, old.clone())
            at = ... if place.index is None else grid(place.index, old.shape)
            best[at] = torch.maximum(best[at], tensor)
            return
        if place.name not in self._sums:
            self._sums[place.name] = torch.zeros_like(old)
            self._weights[place.name] = EntryWeights(old)
        if place.name not in self._moved and not torch.equal(place.read(self._tensors), tensor):
            self._moved.add(place.name)
        total = self._sums[place.name]
        if place.index is None:
            total.add_(tensor, alpha=weight)
        else:
            _add_at(place.index, total, tensor, weight)
        self._weights[place.name].add(place.index, weight)

    def result(self) -> dict[str, Tensor]:
        """Return all server tensors: means where somebody changed them, else the old ones."""
        return {name: self._mean(name, old) for name, old in self._tensors.items()}

    def covered(self, name: str) -> bool | Tensor:
        """Return whether a tensor was covered; where only parts were, which, as a mask."""
        if name not in self._weights:
            return False
        weight = self._weights[name].total()
        if isinstance(weight, float):
            return weight > 0
        return (weight > 0).expand(self._tensors[name].shape)

    def _mean(self, name: str, old: Tensor) -> Tensor:
        if name not in self._sums:
            return old
        total = self._sums[name]
        if name not in self._weights:
            return total
        if name not in self._moved:
            return old
        weight = self._weights[name].total()
        if isinstance(weight, float):
            return total / weight
        return torch.where(weight > 0, total / weight, old)


class EntryWeights:
    """The summed weight of every entry of one tensor.

    Devices of one size keep the same entries, so weights are summed by index, which costs next to
    nothing. They are spread over the entries when somebody asks, or when many indices piled up.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tensor.shape
        self._whole = 0.0
        self._is_whole = True
        self._by_index: dict[tuple[_Key, ...], float] = {}
        # Of size 1 along dimensions that nobody cut, such as the kernel of a convolution.
        self._by_entry = tensor.new_zeros([1] * tensor.ndim)

    def add(self, index: Index | None, weight: float) -> None:
        """Add the weight of one update that holds the entries of an index, None being all."""
        if index is None:
            self._whole += weight
            return
        self._is_whole = False
        key = tuple(_key(part) for part in index)
        self._by_index[key] = self._by_index.get(key, 0.0) + weight
        if len(self._by_index) > _MOST_INDICES:
            self._by_entry = self._spread()
            self._by_index.clear()

    def total(self) -> float | Tensor:
        """Return one number if all updates were whole, else a tensor to broadcast to the shape."""
        # What is spread here is not kept: no result depends on whether one was asked for before.
        return self._whole if self._is_whole else self._spread() + self._whole

    def _spread(self) -> Tensor:
        shape = [
            size if any(key[dim] != _ALL for key in self._by_index) else known
            for dim, (size, known) in enumerate(zip(self._shape, self._by_entry.shape, strict=True))
        ]
        weights = self._by_entry.expand(shape).clone()
        for key, weight in self._by_index.items():
            mask = weights.new_ones(())
            for dim, part in enumerate(key):
                if part != _ALL:
                    mask = mask * _line(part, shape[dim]).reshape(-1, *[1] * (len(key) - dim - 1))
            weights.add_(mask, alpha=weight)
        return weights


_MOST_INDICES = 8
"""So many indices of one tensor are remembered; more sizes than that are rare in one round."""

_Key = tuple[int | None, int | None, int | None] | bytes
_ALL: _Key = (None, None, None)


def _key(part: slice | Tensor) -> _Key:
    if isinstance(part, slice):
        return part.start, part.stop, part.step
    return part.long().numpy().tobytes()


def _line(key: _Key, size: int) -> Tensor:
    """Return a dimension's entries (size,), 1 where they are kept and 0 elsewhere."""
    line = np.zeros(size, np.float32)
    line[np.frombuffer(key, np.int64) if isinstance(key, bytes) else slice(*key)] = 1
    return torch.from_numpy(line)


def _add_at(index: Index, total: Tensor, tensor: Tensor, weight: float) -> None:
    """Add a weighted tensor to the entries of a total that an index keeps."""
    total = total[slices(index)]
    # Rows are added where they belong. Along further dimensions, that would touch a few numbers at
    # a time; copying them apart first, with zeros between, and adding whole rows is much faster.
    for dim, part in enumerate(index):
        if dim > 0 and isinstance(part, Tensor):
            shape = (*tensor.shape[:dim], total.shape[dim], *tensor.shape[dim + 1 :])
            tensor = tensor.new_zeros(shape).index_copy_(dim, part, tensor)
    if index and isinstance(index[0], Tensor):
        total.index_add_(0, index[0], tensor, alpha=weight)
    else:
        total.add_(tensor, alpha=weight)
