"""Labels: the sets against a slow reference, and factors over several dimensions."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sizewise.cutting.union_find import FIXED, Labels, spread

PAIRS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30)


@given(st.lists(PAIRS, max_size=4))
def test_sets_are_those_of_a_slow_reference(batches: list[list[tuple[int, int]]]) -> None:
    labels = Labels()
    labels.add(torch.empty(20, device="meta"))
    reference = list(range(21))
    for batch in batches:
        left, right = np.array(batch).T
        labels.union(left, right)
        for one, other in batch:
            low, high = sorted((reference[one], reference[other]))
            reference = [low if root == high else root for root in reference]
    assert labels.find(np.arange(21)).tolist() == reference


def joint() -> tuple[Labels, torch.Tensor]:
    """Return a tensor (2, 3) whose only factor varies over both dimensions."""
    labels, flat, tensor = Labels(), torch.empty(6, device="meta"), torch.empty(2, 3)
    labels.add(flat)
    labels.put(tensor, [labels.of(flat)[0].reshape(2, 3)])
    return labels, tensor


def test_asking_along_a_dimension_unifies_the_other() -> None:
    labels, tensor = joint()
    assert labels.along(tensor, 1).tolist() == [1, 2, 3]
    assert labels.along(tensor, 0) is None
    assert labels.find(np.arange(1, 7)).tolist() == [1, 2, 3, 1, 2, 3]


def test_keeping_a_dimension_whole_frees_the_other() -> None:
    labels, tensor = joint()
    labels.keep_whole(tensor, 1, "would be noted if it fixed something")
    assert labels.along(tensor, 0).tolist() == [1, 4]
    assert labels.notes.sentences() == ()
    labels.notes.place = "op", "layer"
    labels.keep_whole(tensor, 0, "stays whole")
    assert labels.notes.sentences() == ("op in layer stays whole",)
    assert set(labels.find(np.arange(7))) == {FIXED}


def test_a_set_that_fills_a_dimension_is_fixed() -> None:
    labels, tensor = Labels(), torch.empty(4, device="meta")
    labels.add(tensor)
    labels.union(np.arange(1, 5), np.ones(1, dtype=np.int64))
    assert labels.of(tensor) == []
    assert set(labels.find(np.arange(5))) == {FIXED}


def test_undecided_splits_are_cut_inside() -> None:
    labels, tensor = joint()
    labels.split_later(labels.of(tensor)[0])
    labels.resolve()
    assert labels.of(tensor)[0].shape == (1, 3)


def test_meeting_something_whole_fixes() -> None:
    labels, tensor = Labels(), torch.empty(3, device="meta")
    labels.add(tensor)
    labels.meet(labels.along(tensor, 0), None)
    assert labels.along(tensor, 0) is None


def test_spread() -> None:
    assert spread(np.arange(3), -2, 4).shape == (1, 1, 3, 1)
