"""The one merge: a streaming mean over whoever covers each entry.

For every scalar entry e of the server's tensors, with K(e) the updates that hold e:

    theta_e <- sum_{k in K(e)} w_k theta_e^k / sum_{k in K(e)} w_k     where K(e) is not empty
    theta_e <- theta_e                                                 elsewhere

Updates are added one by one and can be forgotten at once, so memory is O(model), however many
devices report. The order of adding decides the rounding; the federation adds in plan order.
"""

import torch
from torch import Tensor

from sizewise.view import Slot, Tensors, View, grid


class CoverageMean:
    """Adds up updates and gives the mean of what was covered.

    Example:
        >>> mean = CoverageMean({"w": torch.zeros(3)})
        >>> mean.add({"w": torch.ones(2)}, {"w": Slot("w", (slice(0, 2),))}, weight=5.0)
        >>> mean.result()["w"]
        tensor([1., 1., 0.])
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._sums: dict[str, Tensor] = {}
        # A plain number while every update so far held the whole tensor, which is the common case;
        # a tensor of the parameter's shape from the first partial update on.
        self._weights: dict[str, float | Tensor] = {}

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

    def _add_tensor(self, slot: Slot, tensor: Tensor, weight: float) -> None:
        old = self._tensors[slot.name]
        if not old.is_floating_point():
            # Counters such as num_batches_tracked: the furthest one is the useful one.
            best = self._sums.setdefault(slot.name, old.clone())
            place = ... if slot.index is None else grid(slot.index, old.shape)
            best[place] = torch.maximum(best[place], tensor)
            return
        if slot.name not in self._sums:
            self._sums[slot.name] = torch.zeros_like(old)
            self._weights[slot.name] = 0.0
        total, covered = self._sums[slot.name], self._weights[slot.name]
        if slot.index is None:
            total.add_(tensor, alpha=weight)
            self._weights[slot.name] = covered + weight
            return
        if isinstance(covered, float):
            covered = self._weights[slot.name] = torch.full_like(old, covered)
        where = grid(slot.index, old.shape)
        total[where] += tensor * weight
        covered[where] += weight

    def result(self) -> dict[str, Tensor]:
        """Return all server tensors, covered entries replaced and all others as they were."""
        return {name: self._mean(name, old) for name, old in self._tensors.items()}

    def covered(self, name: str) -> bool | Tensor:
        """Return whether a tensor was covered; where only parts were, which, as a mask."""
        weight = self._weights.get(name, 0.0)
        return weight > 0

    def _mean(self, name: str, old: Tensor) -> Tensor:
        if name not in self._sums:
            return old
        total, covered = self._sums[name], self._weights.get(name)
        if covered is None:
            return total
        if isinstance(covered, float):
            return total / covered
        return torch.where(covered > 0, total / covered, old)
