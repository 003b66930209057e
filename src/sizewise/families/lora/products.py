"""Merges that look at both factors of an adapter: what counts is B A, not A and B.

Everything that is no adapter, such as a head, is merged by the coverage mean.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.view import Tensors, View
from sizewise.families.lora.adapters import DOWN, UP, pairs

Pair = tuple[Tensor, Tensor]
"""The factors of an adapter: A (r, inputs, ...) and B (outputs, r, ...)."""


def factors(change: Tensor, rank: int) -> Pair:
    """Return A (rank, inputs) and B (outputs, rank) whose product is nearest to a matrix.

    B A is its singular value decomposition, cut off: B = U S and A = V^T, largest values first.
    Where the matrix has fewer directions than asked for, rows and columns of zeros follow.
    """
    left, values, right = torch.linalg.svd(change, full_matrices=False)
    kept = min(rank, len(values))
    down, up = change.new_zeros(rank, change.shape[1]), change.new_zeros(len(change), rank)
    down[:kept], up[:, :kept] = right[:kept], left[:, :kept] * values[:kept]
    return down, up


class PairMerging:
    """Takes updates apart into adapters and all else; a method says what adapters become."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._others = tensors, CoverageMean(tensors)
        self._layers: set[str] = set()

    def add(self, update: Tensors, view: View, weight: float) -> None:
        """Take one update: trained tensors by local name, where they live, how much they count."""
        adapters = {layer: (down, up) for layer, down, up in pairs(update)}
        names = {layer + ending for layer in adapters for ending in (DOWN, UP)}
        self._others.add({n: t for n, t in update.items() if n not in names}, view, weight)
        self._layers |= adapters.keys()
        self.take(adapters, weight)

    def take(self, adapters: Mapping[str, Pair], weight: float) -> None:
        """Take the adapters of one update, by the layer that each is beside."""
        raise NotImplementedError

    def merged(self, layer: str) -> dict[str, Tensor]:
        """Return the server's next tensors of a layer that somebody has adapted."""
        raise NotImplementedError

    def result(self) -> dict[str, Tensor]:
        """Return all server tensors: merged where updates covered them, else the old ones."""
        found = self._others.result()
        for layer in sorted(self._layers):
            found |= self.merged(layer)
        return found

    def covered(self, name: str) -> bool | Tensor:
        """Return whether a tensor was covered; where only parts were, which, as a mask."""
        layer = name.removesuffix(DOWN).removesuffix(UP)
        return True if layer in self._layers else self._others.covered(name)
