"""FlexLoRA: toy numbers, and numpy's decomposition as the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from low_rank import LARGE, LAYER, SERVER, SMALL, adapter, change, view
from sizewise.families.lora.adapters import DOWN, UP
from sizewise.families.lora.products import factors
from sizewise.methods.flexlora import Products


def test_toy_numbers() -> None:
    merging = Products(SERVER)
    merging.add(SMALL, view(1), 1.0)
    merging.add(LARGE, view(2), 1.0)
    merged = merging.result()
    # A mean of rank 2 is kept whole: ([[1, 2, 0], [0, 0, 0]] + [[0, 2, 2], [2, 0, 0]]) / 2.
    torch.testing.assert_close(change(merged), torch.tensor([[0.5, 2.0, 1.0], [1.0, 0.0, 0.0]]))
    assert merging.covered(LAYER + UP) is True


def test_the_first_column_is_the_best_of_rank_one() -> None:
    merging = Products(SERVER)
    merging.add(adapter([[0.0, 3.0, 4.0], [2.0, 0.0, 0.0]], [[3.0, 0.0], [0.0, 1.0]]), view(2), 2.0)
    merged = merging.result()
    first = merged[LAYER + UP][:, :1] @ merged[LAYER + DOWN][:1]
    # Singular values 15, of the first row, and 2, of the second.
    torch.testing.assert_close(first, torch.tensor([[0.0, 9.0, 12.0], [0.0, 0.0, 0.0]]))
    assert merged[LAYER + UP].norm(dim=0).tolist() == pytest.approx([15.0, 2.0])


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.integers(0, 99))
def test_factors_are_those_of_numpy(rows: int, columns: int, rank: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).normal(size=(rows, columns))
    down, up = factors(torch.from_numpy(drawn), rank)
    left, values, right = np.linalg.svd(drawn, full_matrices=False)
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    np.testing.assert_allclose((up @ down).numpy(), best, atol=1e-9)
    assert down.shape == (rank, columns)
    assert up.shape == (rows, rank)
