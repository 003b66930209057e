"""What every merge has: updates go in one by one, the server's next tensors come out."""

from typing import Protocol

from torch import Tensor

from sizewise.exchange.view import Tensors, View


class Merging(Protocol):
    """Takes the updates of one round, in plan order, and gives the tensors that follow."""

    def add(self, update: Tensors, view: View, weight: float) -> None:
        """Take one update: trained tensors by local name, where they live, how much they count."""

    def result(self) -> dict[str, Tensor]:
        """Return all server tensors: merged where updates covered them, else the old ones."""

    def covered(self, name: str) -> bool | Tensor:
        """Return whether a tensor was covered; where only parts were, which, as a mask."""
