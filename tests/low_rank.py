"""Toy adapters for tests: two devices whose factors are small whole numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sizewise.exchange.view import TensorSlice, View
from sizewise.families.lora.adapters import DOWN, UP

LAYER = "block.0.linear"
Numbers = list[list[float]]


def adapter(down: Numbers, up: Numbers) -> dict[str, Tensor]:
    """Return A (r, inputs) and B (outputs, r) of one layer, by name."""
    return {LAYER + DOWN: torch.tensor(down), LAYER + UP: torch.tensor(up)}


def change(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return B A."""
    return tensors[LAYER + UP] @ tensors[LAYER + DOWN]


def view(rank: int) -> View:
    """Return where the tensors of a device of some rank live."""
    first, every = slice(0, rank), slice(None)
    return {
        LAYER + DOWN: TensorSlice(LAYER + DOWN, (first, every)),
        LAYER + UP: TensorSlice(LAYER + UP, (every, first)),
    }


SMALL = adapter([[1.0, 2.0, 0.0]], [[1.0], [0.0]])
LARGE = adapter([[0.0, 1.0, 1.0], [2.0, 0.0, 0.0]], [[2.0, 0.0], [0.0, 1.0]])
"""Of rank 1, with the product [[1, 2, 0], [0, 0, 0]]; of rank 2, [[0, 2, 2], [2, 0, 0]]."""

SERVER = adapter([[5.0, 5.0, 5.0], [7.0, 7.0, 7.0]], [[0.0, 0.0], [0.0, 0.0]])
