"""Axes have round numbers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise.report.chart import apart
from sizewise.report.scales import Scale, rounds, ticks, unit


def test_ticks_are_round() -> None:
    assert ticks(0, 20, 5) == [0, 5, 10, 15, 20]
    assert ticks(0.853, 0.975, 6) == [0.85, 0.9, 0.95, 1.0]
    assert ticks(3, 3) == [3, 4, 5, 6]


@given(low=st.floats(-1e6, 1e6), length=st.floats(1e-3, 1e6), about=st.integers(1, 10))
def test_ticks_cover_the_data(low: float, length: float, about: int) -> None:
    marks = ticks(low, low + length, about)
    slack = 1e-6 * (abs(low) + length)
    assert marks[0] <= low + slack
    assert marks[-1] >= low + length - slack
    assert 2 <= len(marks) <= about + 3


def test_rounds_are_whole() -> None:
    assert rounds(3, 7) == [0, 1, 2, 3]
    assert rounds(20, 4) == [0, 5, 10, 15, 20]
    assert rounds(1, 4) == [0, 1]


def test_a_scale_is_a_line() -> None:
    scale = Scale(10, 20, 100, 0)
    assert (scale(10), scale(15), scale(20)) == (100, 50, 0)


@pytest.mark.parametrize(
    ("cost", "high", "name"),
    [("sent", 2e6, "MB"), ("sent", 900, "B"), ("flops", 3e12, "TFLOP"), ("seconds", 600, "min")],
)
def test_units_that_people_read(cost: str, high: float, name: str) -> None:
    assert unit(cost, high)[0] == name


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_labels_do_not_overlap_and_keep_their_order(wanted: list[float]) -> None:
    places = apart(wanted, 10, 0, 100)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for before, after in pairwise(order):
        assert places[after] - places[before] >= 10 - 1e-9
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in places)
