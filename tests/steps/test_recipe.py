import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise.errors import ConfigError
from sizewise.steps.recipe import Recipe


def rates(recipe: Recipe, rounds: int) -> list[float]:
    return [recipe.lr_at(r, rounds) for r in range(rounds)]


def test_constant_rate() -> None:
    assert rates(Recipe(lr=0.3), 3) == [0.3, 0.3, 0.3]


def test_cosine_rate_by_hand() -> None:
    half = math.sqrt(0.5)
    expected = [0.1, 0.05 * (1 + half), 0.05, 0.05 * (1 - half)]
    assert rates(Recipe(lr=0.1, schedule="cosine"), 4) == pytest.approx(expected)
    # SLT: 0.1 -> 0.01.
    slt = Recipe(lr=0.1, lr_min=0.01, schedule="cosine")
    assert slt.lr_at(0, 10) == pytest.approx(0.1)
    assert slt.lr_at(5, 10) == pytest.approx(0.055)
    assert slt.lr_at(10, 10) == pytest.approx(0.01)


def test_recursive_cosine_is_the_closed_form() -> None:
    # FeDepth and SplitMix step a CosineAnnealingLR, which multiplies from round to round.
    recipe, lr, rounds = Recipe(lr=0.1, schedule="cosine"), 0.1, 50
    for r in range(rounds):
        assert recipe.lr_at(r, rounds) == pytest.approx(lr)
        here, there = (1 + math.cos(math.pi * k / rounds) for k in (r, r + 1))
        lr *= there / here


def test_steps_at_fractions_of_the_run() -> None:
    # NeFL: a tenth at R/2 and at 3R/4.
    expected = [0.1] * 4 + [0.01] * 2 + [0.001] * 2
    assert rates(Recipe(lr=0.1, schedule="steps"), 8) == pytest.approx(expected)


def test_steps_at_rounds() -> None:
    recipe = Recipe(lr=1.0, schedule="steps", milestones=(2, 3), decay=0.25)
    assert rates(recipe, 5) == pytest.approx([1, 1, 0.25, 0.0625, 0.0625])


@given(st.integers(1, 99))
def test_fraction_of_a_hundred_rounds_is_that_round(percent: int) -> None:
    recipe = Recipe(lr=1.0, schedule="steps", milestones=(percent / 100,), decay=0.5)
    assert recipe.lr_at(percent - 1, 100) == 1.0
    assert recipe.lr_at(percent, 100) == 0.5


def test_exponential_rate() -> None:
    recipe = Recipe(lr=0.1, schedule="exponential", decay=0.998)
    assert rates(recipe, 3) == pytest.approx([0.1, 0.0998, 0.0996004])


@pytest.mark.parametrize("name", ["epochs", "batch", "eval_batch", "eval_every"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"recipe\.{name} must be at least 1, not 0"):
        Recipe(**{name: 0})


@pytest.mark.parametrize("name", ["lr", "server_lr", "server_tau", "decay"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_rates_are_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"recipe\.{name} must be a positive number"):
        Recipe(**{name: value})


@pytest.mark.parametrize("name", ["weight_decay", "proximal", "lr_min", "momentum"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_penalties_are_not_negative(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"recipe\.{name} must not be negative"):
        Recipe(**{name: value})


@pytest.mark.parametrize("name", ["momentum", "server_momentum", "server_beta2"])
def test_momenta_are_below_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"recipe\.{name} must be in \[0, 1\), not 1\.0"):
        Recipe(**{name: 1.0})


@pytest.mark.parametrize(("name", "value"), [("clip", 0.0), ("clip", math.nan), ("max_steps", 0)])
def test_limits_are_positive_or_left_out(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"recipe\.{name} must be positive.*leave it out"):
        Recipe(**{name: value})
