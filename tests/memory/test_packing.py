from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise.errors import BudgetTooSmall
from sizewise.memory.packing import count_fitting, largest_ratio, pack_blocks


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
def test_largest_ratio_is_the_last_that_fits(costs, budget):
    costs = sorted(costs)
    ratios = [(i + 1) / len(costs) for i in range(len(costs))]
    table = dict(zip(ratios, costs, strict=True))
    fitting = [ratio for ratio in ratios if table[ratio] <= budget]
    if fitting:
        assert largest_ratio(table.__getitem__, budget, ratios) == fitting[-1]
    else:
        with pytest.raises(BudgetTooSmall) as error:
            largest_ratio(table.__getitem__, budget, ratios)
        assert error.value.needed == costs[0]


def test_largest_ratio_asks_little():
    asked = []
    ratios = [i / 64 for i in range(1, 65)]
    largest_ratio(lambda ratio: asked.append(ratio) or int(1000 * ratio), 300, ratios)
    assert len(asked) <= 7


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200).map(sorted), st.integers(0, 10**9))
def test_as_many_fit_as_by_halving(costs, budget):
    choices = range(len(costs))
    assert count_fitting(costs.__getitem__, budget, choices) == bisect_right(costs, budget)


def test_even_costs_are_hardly_looked_at():
    asked = []

    def cost(width):
        asked.append(width)
        return 300_000 + 20_000 * width + 100 * width**2

    assert count_fitting(cost, 1_200_000, range(1, 65)) == 37
    assert asked == [64, 38, 37]
