"""Secret randomness: fair, repeatable with its key, unrelated without it."""

import pytest
import torch

from sizewise.privacy.randomness import Secret


def test_normal_numbers_are_normal() -> None:
    drawn = Secret.of_seed(1).normal((200, 500), "noise")
    assert drawn.dtype == torch.float64
    assert drawn.mean().item() == pytest.approx(0.0, abs=0.01)
    assert drawn.std().item() == pytest.approx(1.0, abs=0.01)
    quantiles = torch.quantile(drawn.flatten(), torch.tensor([0.02275, 0.5, 0.97725]).double())
    assert quantiles.tolist() == pytest.approx([-2.0, 0.0, 2.0], abs=0.03)
    assert drawn.isfinite().all()


def test_numbers_depend_on_key_and_purpose_alone() -> None:
    one = Secret.of_seed(1)
    assert torch.equal(one.normal((5,), "a", 1), Secret(one.key).normal((5,), "a", 1))
    others = [one.normal((5,), "a", 2), one.normal((5,), "b", 1), Secret.of_seed(2).normal((5,), 1)]
    assert not any(torch.equal(one.normal((5,), "a", 1), other) for other in others)
    assert one.whole_number("x") != one.whole_number("y")


def test_fresh_secrets_differ() -> None:
    assert Secret.fresh().key != Secret.fresh().key


def test_a_digest_needs_the_key() -> None:
    tensors = [("w", torch.ones(3, dtype=torch.float64))]
    one, other = Secret.of_seed(1), Secret.of_seed(2)
    assert one.digest(tensors, 0) == one.digest(tensors, 0)
    assert one.digest(tensors, 0) != other.digest(tensors, 0)
    assert one.digest(tensors, 0) != one.digest([("v", tensors[0][1])], 0)


def test_numbers_of_no_dimension_and_of_no_entries() -> None:
    assert Secret.of_seed(0).normal((), "x").shape == ()
    assert Secret.of_seed(0).normal((0, 3), "x").shape == (0, 3)
