from collections.abc import Callable

import pytest
import torch

from depth_cases import make_runner, make_task
from sizewise.errors import BudgetTooSmall
from sizewise.exchange.plan import Update
from sizewise.families.prefixwise import Depth
from sizewise.fleet.devices import Device
from sizewise.methods.allsmall import AllSmall
from sizewise.methods.inclusivefl import InclusiveFL
from sizewise.training.task import Task

VIT = {"patch": 2, "dim": 8, "heads": 2, "depth": 3}


def peaks(task: Task) -> list[int]:
    """Return what a step of each depth costs."""
    method = AllSmall(task, AllSmall.Options(exits=(1, 2)))
    return [method.peak(method.single(depth)) for depth in (1, 2, 3)]


def made(budgets: Callable[[list[int]], tuple[int | None, ...]]) -> AllSmall:
    costs = peaks(make_task("vit", VIT))
    task = make_task("vit", VIT, budgets=budgets(costs))
    return AllSmall(task, AllSmall.Options(exits=(1, 2)))


def test_everybody_trains_the_depth_of_the_weakest() -> None:
    method = made(lambda costs: (costs[1], costs[2], None))
    state = method.setup()
    for memory in method.task.budgets:
        plan = method.plan(state, Device(0, "any", memory), 0)
        assert plan.submodel == Depth((2,), "exit 2")
    assert list(method.sizes(state)) == [Depth((2,), "exit 2")]
    # Nothing else is on the server.
    assert not [name for name in state.tensors if name.startswith(("blocks.2.", "head."))]


def test_one_byte_less_is_one_depth_less_and_too_little_is_refused() -> None:
    method = made(lambda costs: (costs[1] - 1, None))
    assert method.main == Depth((1,), "exit 1")
    method = made(lambda costs: (costs[0] - 1, costs[1]))
    assert method.main == Depth((2,), "exit 2")
    with pytest.raises(BudgetTooSmall):
        method.plan(method.setup(), Device(0, "weak", method.task.budgets[0]), 0)


def test_it_starts_and_trains_as_the_smallest_size_of_inclusivefl() -> None:
    method = made(lambda costs: (costs[0], None))
    other = InclusiveFL(method.task, InclusiveFL.Options(exits=(1, 2)))
    found, expected = [], []
    for each, into in ((method, found), (other, expected)):
        runner, state = make_runner(each), each.setup()
        plan = each.plan(state, Device(0, "weak", method.task.budgets[0]), 0)
        update = runner.train(state, plan)
        assert isinstance(update, Update)
        into.append(update.tensors)
    assert found[0].keys() == expected[0].keys()
    assert all(torch.equal(found[0][name], expected[0][name]) for name in found[0])
