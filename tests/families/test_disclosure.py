"""Clipping and noise on what is shared."""

import pytest
import torch

from sizewise.errors import ConfigError
from sizewise.families.disclosure import Blur


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_rows_are_clipped_to_a_norm() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clipped = Blur(clip=1.0).blur(rows, generator())
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_a_row_is_a_sample_of_any_shape() -> None:
    rows = torch.randn(4, 2, 3, 3)
    clipped = Blur(clip=0.5).blur(rows, generator())
    torch.testing.assert_close(clipped.flatten(1).norm(dim=1), torch.full((4,), 0.5))


def test_noise_comes_from_the_generator_and_has_its_deviation() -> None:
    rows = torch.zeros(200, 50)
    noisy = Blur(noise=0.25).blur(rows, generator())
    assert float(noisy.std()) == pytest.approx(0.25, rel=0.03)
    assert torch.equal(noisy, Blur(noise=0.25).blur(rows, generator()))


def test_nothing_asked_nothing_done() -> None:
    rows = torch.randn(3, 2)
    assert Blur().blur(rows, generator()) is rows


@pytest.mark.parametrize(
    "options", [{"clip": 0.0}, {"clip": -1.0}, {"noise": -0.1}, {"noise": float("inf")}]
)
def test_senseless_numbers_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"method.{next(iter(options))} must"):
        Blur(**options)
