"""The norm bound: no device moves the model further than so far, then the mean.

Sun et al. 2019, "Can You Really Backdoor Federated Learning?" (https://arxiv.org/abs/1911.07963).
With d_k the change of all that device k's piece holds, each device counting the same:

    d_k <- d_k min(1, bound_k / ||d_k||);    every entry: the mean over the devices that cover it

A bound that is given is the same for all devices, and updates stream as in the mean. Without one,
it is the median, over the devices of the round, of the root mean square of d_k's entries, times
the root of how many entries the piece holds: a large piece may move further than a small one. Then
updates are kept until the last has come.
"""

import math
import statistics

from torch import Tensor

from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.view import Tensors, View


class NormBound:
    """Scales down updates that move too far, and gives the mean of what was covered.

    Example:
        >>> import torch
        >>> from sizewise.exchange.view import whole
        >>> server = {"w": torch.zeros(1)}
        >>> merge = NormBound(server, bound=1.0)
        >>> merge.add({"w": torch.tensor([9.0])}, whole(server), weight=1.0)
        >>> merge.add({"w": torch.tensor([0.5])}, whole(server), weight=1.0)
        >>> merge.result()["w"]
        tensor([0.7500])
    """

    def __init__(self, tensors: Tensors, bound: float | None = None) -> None:
        self._tensors, self._bound = tensors, bound
        self._mean = CoverageMean(tensors)
        self._waiting: list[tuple[Tensors, View, float]] = []

    def add(self, update: Tensors, view: View, weight: float) -> None:
        """Take one update: trained tensors by local name, and where they live."""
        squares, entries = 0.0, 0
        for local, tensor in update.items():
            if tensor.is_floating_point():
                change = tensor.double() - view[local].read(self._tensors).double()
                squares, entries = squares + float(change.square().sum()), entries + change.numel()
        norm = math.sqrt(squares)
        if self._bound is None:
            self._waiting.append((update, view, norm / math.sqrt(max(1, entries))))
        else:
            self._take(update, view, norm, self._bound)

    def _take(self, update: Tensors, view: View, length: float, bound: float) -> None:
        """Add an update to the mean, shortened if its length is beyond a bound."""
        if length > bound:
            factor = bound / length
            update = {
                local: _shortened(tensor, view[local].read(self._tensors), factor)
                for local, tensor in update.items()
            }
        self._mean.add(update, view, 1.0)

    def _settle(self) -> None:
        """Merge what waited for the median."""
        if self._waiting:
            bound = statistics.median(length for _, _, length in self._waiting)
            for update, view, length in self._waiting:
                self._take(update, view, length, bound)
            self._waiting = []

    def result(self) -> dict[str, Tensor]:
        """Return all server tensors: merged where updates covered them, else the old ones."""
        self._settle()
        return self._mean.result()

    def covered(self, name: str) -> bool | Tensor:
        """Return whether a tensor was covered; where only parts were, which, as a mask."""
        self._settle()
        return self._mean.covered(name)


def _shortened(tensor: Tensor, old: Tensor, factor: float) -> Tensor:
    return old + factor * (tensor - old) if tensor.is_floating_point() else tensor
