"""The leaderboard's figures inside the library: fleets that are alike, rows that are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise import methods
from sizewise.runs import leaderboard
from sizewise.runs.leaderboard import Board, Standing


def standing(name: str, accuracy: float, note: str = "") -> Standing:
    seeds = (accuracy, accuracy)
    return Standing(name, name, "none", accuracy, None, 1.0, 1, 1, 1, 1.0, seeds, note)


def board(*shares: tuple[float, float], text: bool = False, interval: float | None = None) -> Board:
    rows = (standing("whole", 0.9, "looks at no budget"), standing("a", 0.8), standing("b", 0.77))
    return Board("task", "A task", "fleet", "a fleet", text, shares, rows, interval)


def test_distance_by_hand() -> None:
    ours = board((0.2, 0.5), (1.5, 0.5))
    assert ours.distance([(0.2, 0.5), (9.0, 0.5)]) == 0  # the whole model is the whole model
    assert ours.distance([(0.4, 0.5), (1.0, 0.5)]) == pytest.approx(0.5 * 0.2)
    # A quarter has 0.2 and all others 1: they differ in the second quarter only.
    assert ours.distance([(1.0, 0.75), (0.2, 0.25)]) == pytest.approx(0.25 * 0.8)


fleets = st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(1, 9)), min_size=1, max_size=5).map(
    lambda kinds: [(share, count / sum(c for _, c in kinds)) for share, count in kinds]
)


@given(fleets, fleets, st.randoms())
def test_distance_is_one(ours: list[tuple[float, float]], theirs: list, random: object) -> None:
    there = board(*ours).distance(theirs)
    assert 0 <= there <= 1
    assert there == pytest.approx(board(*theirs).distance(ours))
    assert board(*ours).distance(list(reversed(ours))) == pytest.approx(0)


def test_texts_are_compared_with_texts() -> None:
    images, texts = board((0.5, 1.0)), board((1.0, 1.0), text=True)
    assert leaderboard.nearest([images, texts], [(0.5, 1.0)], text=True) is texts
    assert leaderboard.nearest([images, texts], [(0.5, 1.0)], text=False) is images
    assert leaderboard.nearest([images], [(1.0, 1.0)], text=True) is images


def test_first_are_those_that_cannot_be_told_apart() -> None:
    def first(interval: float | None) -> list[str]:
        return [row.name for row in board((1.0, 1.0), interval=interval).first]

    assert first(None) == ["a"]  # never the one that looks at no budget
    assert first(0.02) == ["a"]
    assert first(0.04) == ["a", "b"]


def test_what_is_shipped_can_be_read() -> None:
    boards = leaderboard.read()
    assert boards
    for found in boards:
        assert sum(part for _, part in found.shares) == pytest.approx(1)
        assert {row.method for row in found.rows} <= set(methods.names())
        accuracies = [row.accuracy for row in found.rows]
        assert accuracies == sorted(accuracies, reverse=True)
        assert found.first
