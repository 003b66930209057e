from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise.common.widths import named, scaled, scaled_growth, scaled_to_heads
from sizewise.errors import ModelError

WIDTHS = (16, 32, 64, 128, 256, 512)

# The ratio as exact arithmetic has it, and as floating-point code arrives at it.
RATIOS = [
    (Fraction(1, 8), 1 / 8),
    (Fraction(1, 6), 1 / 6),
    (Fraction(1, 4), 0.25),
    (Fraction(1, 3), 1 / 3),
    (Fraction(1, 2), 0.5),
    *((Fraction(k, 5), k * 0.2) for k in range(1, 6)),
    *((Fraction(k, 10), k * 0.1) for k in range(1, 11)),
]


@pytest.mark.parametrize("channels", WIDTHS)
@pytest.mark.parametrize(("exact", "ratio"), RATIOS)
def test_rounding_is_that_of_exact_arithmetic(channels: int, exact: Fraction, ratio: float) -> None:
    product = channels * exact
    assert scaled(channels, ratio, "floor") == product.__floor__()
    assert scaled(channels, ratio, "ceil") == product.__ceil__()


def test_guard_is_needed() -> None:
    assert 5 * (3 * 0.2) > 3
    assert scaled(5, 3 * 0.2, "ceil") == 3
    assert 10 * (0.7 / 0.1) < 70
    assert scaled(10, 0.7 / 0.1, "floor") == 70


@pytest.mark.parametrize(
    ("ratio", "rule", "expected"),
    [
        (1 / 6, "ceil", (3, 6, 11)),
        (0.165, "floor", (2, 5, 10)),
        (1 / 8, "ceil", (2, 4, 8)),
        (1 / 8, "floor", (2, 4, 8)),
        (0.03, "floor_min1", (1, 1, 1)),
        (1.0, "floor", (16, 32, 64)),
        (2.0, "ceil", (32, 64, 128)),
    ],
)
def test_preresnet_tables(ratio: float, rule: str, expected: tuple[int, ...]) -> None:
    assert tuple(scaled(channels, ratio, rule) for channels in (16, 32, 64)) == expected


def test_floor_refuses_to_keep_nothing() -> None:
    with pytest.raises(ModelError, match=r"none of 16 channels; use a width of at least 0\.0625"):
        scaled(16, 0.03)


@pytest.mark.parametrize("ratio", [0.0, -0.5, float("nan"), float("inf")])
def test_ratio_must_be_positive(ratio: float) -> None:
    with pytest.raises(ModelError, match="positive number"):
        scaled(16, ratio)
    with pytest.raises(ModelError, match="positive number"):
        scaled_to_heads(16, ratio, 4)


def test_unknown_rule_and_empty_layer() -> None:
    with pytest.raises(ModelError, match="one of floor, floor_min1, ceil; 'up' came"):
        scaled(16, 0.5, "up")
    with pytest.raises(ModelError, match="at least one channel; 0 came"):
        scaled(0, 0.5)


@given(
    channels=st.integers(1, 1024),
    low=st.floats(0.001, 1),
    high=st.floats(0.001, 1),
    rule=st.sampled_from(["floor_min1", "ceil"]),
)
def test_widths_nest(channels: int, low: float, high: float, rule: str) -> None:
    low, high = sorted((low, high))
    assert 1 <= scaled(channels, low, rule) <= scaled(channels, high, rule) <= channels


@given(ratio=st.floats(1 / 12, 1), layers=st.integers(1, 20))
def test_growth_sums_to_the_scaled_total(ratio: float, layers: int) -> None:
    grown = sum(scaled_growth(24 + 12 * layer, 12, ratio) for layer in range(layers))
    assert scaled(24, ratio) + grown == scaled(24 + 12 * layers, ratio)


def test_growth_of_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="none of the 12 channels"):
        scaled_growth(24, 12, 0.05)


@pytest.mark.parametrize(
    ("dim", "ratio", "heads", "expected"),
    [(768, 0.747**0.5, 12, 672), (192, 1 / 6, 3, 33), (192, 0.5, 3, 96), (64, 0.001, 4, 4)],
)
def test_embeddings_stay_multiples_of_heads(
    dim: int, ratio: float, heads: int, expected: int
) -> None:
    assert scaled_to_heads(dim, ratio, heads) == expected


@pytest.mark.parametrize(
    ("ratio", "name"),
    [
        (0.5, "0.5"),
        (0.0625, "0.0625"),
        (1.0, "1"),
        (1 / 3, "1/3"),
        (5 / 64, "5/64"),
        (0.50001, "0.50001"),
        (0.1 + 0.2, "0.30000000000000004"),
    ],
)
def test_names_of_ratios(ratio: float, name: str) -> None:
    assert named(ratio) == name


@given(st.floats(0.001, 1), st.floats(0.001, 1))
def test_different_ratios_have_different_names(one: float, other: float) -> None:
    assert (named(one) == named(other)) == (one == other)
    assert float(Fraction(named(one))) == one
