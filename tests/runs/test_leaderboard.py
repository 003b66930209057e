"""The leaderboard's figures inside the library: fleets that are alike, rows that are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise import methods
from sizewise.runs import leaderboard
from sizewise.runs.leaderboard import Board, Shape, Standing


def standing(name: str, accuracy: float, note: str = "") -> Standing:
    seeds = (accuracy, accuracy)
    return Standing(name, name, "none", accuracy, None, 1.0, 1, 1, 1, 1.0, seeds, note)


def board(shape: Shape, text: bool = False, interval: float | None = None) -> Board:
    rows = (standing("whole", 0.9, "looks at no budget"), standing("a", 0.8), standing("b", 0.77))
    return Board("task", "A task", "fleet", "a fleet", text, shape, rows, interval)


def test_distance_by_hand() -> None:
    ours = Shape(((0.2, 0.5), (1.5, 0.5)), least=0.9)
    # The whole model is the whole model, and half of the devices can train it.
    assert ours.distance(Shape(((0.2, 0.5), (9.0, 0.5)), 0.9)) == 0
    # Half of the devices hold 0.2 more; with levers that are worth it, they train the whole model.
    more = ((0.4, 0.5), (1.0, 0.5))
    assert ours.distance(Shape(more, 0.5)) == pytest.approx(0.5 * 0.2 / 2)
    assert ours.distance(Shape(more, 0.4)) == pytest.approx((0.5 * 0.2 + 0.5) / 2)
    # A quarter has 0.2 and all others 1: they differ in the second quarter only.
    quarter = Shape(((1.0, 0.75), (0.2, 0.25)), 0.9)
    assert ours.distance(quarter) == pytest.approx((0.25 * 0.8 + 0.25) / 2)


shapes = st.builds(
    lambda kinds, least: Shape(tuple((s, n / sum(m for _, m in kinds)) for s, n in kinds), least),
    st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(1, 9)), min_size=1, max_size=5),
    st.floats(0.1, 1.0),
)


@given(shapes, shapes)
def test_distance_is_one(ours: Shape, theirs: Shape) -> None:
    assert -1e-9 <= ours.distance(theirs) <= 1 + 1e-9
    assert ours.distance(theirs) == pytest.approx(theirs.distance(ours))
    assert ours.distance(replace(ours, shares=ours.shares[::-1])) == pytest.approx(0)


def test_texts_are_compared_with_texts() -> None:
    half, whole = Shape(((0.5, 1.0),), 0.9), Shape(((1.0, 1.0),), 0.9)
    images, texts = board(half), board(whole, text=True)
    assert leaderboard.nearest([images, texts], half, text=True) is texts
    assert leaderboard.nearest([images, texts], half, text=False) is images
    assert leaderboard.nearest([images], whole, text=True) is images


def test_first_are_those_that_cannot_be_told_apart() -> None:
    def first(interval: float | None) -> list[str]:
        return [row.name for row in board(Shape(((1.0, 1.0),), 0.9), interval=interval).first]

    assert first(None) == ["a"]  # never the one that looks at no budget
    assert first(0.02) == ["a"]
    assert first(0.04) == ["a", "b"]


def test_what_is_shipped_can_be_read() -> None:
    boards = leaderboard.read()
    assert boards
    for found in boards:
        assert sum(part for _, part in found.shape.shares) == pytest.approx(1)
        assert {row.method for row in found.rows} <= set(methods.names())
        accuracies = [row.accuracy for row in found.rows]
        assert accuracies == sorted(accuracies, reverse=True)
        assert found.first
