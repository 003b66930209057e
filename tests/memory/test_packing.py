import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise.errors import BudgetTooSmall
from sizewise.memory.packing import largest_fitting, pack_blocks


def additive(sizes):
    return lambda start, stop: sum(sizes[start:stop])


@pytest.mark.parametrize(("budget", "stages"), [(3, [1, 2, 3]), (5, [2, 4])])
def test_toy_example_of_fedepth(budget, stages):
    packing = pack_blocks(additive([3, 2, 1, 0.5, 0.5, 0.5]), 6, budget)
    assert [len(stage) for stage in packing.stages] == stages
    assert packing.skipped == ()


def test_a_block_that_does_not_fit_alone_is_skipped():
    packing = pack_blocks(additive([9, 2, 9, 1, 1]), 5, 3)
    assert packing.stages == (range(1, 2), range(3, 5))
    assert packing.skipped == (0, 2)


def test_budget_too_small_names_the_smallest_that_would_do():
    sizes = [900, 200, 900]
    with pytest.raises(BudgetTooSmall) as error:
        pack_blocks(additive(sizes), 3, 100)
    assert error.value.needed == 200
    assert pack_blocks(additive(sizes), 3, error.value.needed).stages == (range(1, 2),)


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 200), st.floats(0, 0.2))
def test_every_stage_fits_and_every_block_is_somewhere(sizes, budget, tolerance):
    cost = additive(sizes)
    limit = budget * (1 + tolerance)
    try:
        packing = pack_blocks(cost, len(sizes), budget, tolerance)
    except BudgetTooSmall:
        assert min(sizes) > limit
        return
    assert all(cost(stage.start, stage.stop) <= limit for stage in packing.stages)
    assert all(sizes[block] > limit for block in packing.skipped)
    blocks = [block for stage in packing.stages for block in stage]
    assert sorted([*blocks, *packing.skipped]) == list(range(len(sizes)))
    for stage in packing.stages:  # greedy: the next block would not have fitted
        assert stage.stop == len(sizes) or cost(stage.start, stage.stop + 1) > limit


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 1000))
def test_largest_fitting_is_the_last_that_fits(costs, budget):
    costs = sorted(costs)
    choices = list(range(len(costs)))
    fitting = [choice for choice in choices if costs[choice] <= budget]
    found = largest_fitting(choices, costs.__getitem__, budget)
    assert found == (fitting[-1] if fitting else None)


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 1000))
def test_costs_that_are_not_in_order_are_looked_at_one_by_one(costs, budget):
    choices = range(len(costs))
    fitting = [choice for choice in choices if costs[choice] <= budget]
    found = largest_fitting(choices, costs.__getitem__, budget, ascending=False)
    assert found == (fitting[-1] if fitting else None)


def test_without_a_budget_the_last_is_taken_unasked():
    assert largest_fitting([1, 2, 3], lambda choice: 1 / 0, None) == 3


def test_largest_fitting_asks_little():
    asked = []
    choices = [i / 64 for i in range(1, 65)]
    largest_fitting(choices, lambda choice: asked.append(choice) or int(1000 * choice), 300)
    assert len(asked) <= 7
    asked.clear()
    largest_fitting(choices, lambda choice: asked.append(choice) or 1, 300)
    assert len(asked) == 1, "the last fits"
