"""FedLoRA: a mean of factors, and why that is not the mean of what devices learned."""

from collections.abc import Callable

import pytest
import torch

from low_rank import LARGE, LAYER, SERVER, adapter, change, view
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.state import State
from sizewise.families.lora.adapters import DOWN, UP, Rank
from sizewise.methods.fedlora import FedLoRA
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def test_toy_numbers() -> None:
    other = adapter([[2.0, 1.0, 1.0], [0.0, 0.0, 4.0]], [[0.0, 0.0], [4.0, 1.0]])
    mean = CoverageMean(SERVER)
    mean.add(LARGE, view(2), 1.0)
    mean.add(other, view(2), 3.0)
    merged = mean.result()
    assert merged[LAYER + DOWN].tolist() == [[1.5, 1.0, 1.0], [0.5, 0.0, 3.0]]
    assert merged[LAYER + UP].tolist() == [[0.5, 0.0], [3.0, 1.0]]
    # The mean of factors is not the factor of the mean.
    exact = (change(LARGE) + 3 * change(other)) / 4
    assert exact.tolist() == [[0.0, 0.5, 0.5], [6.5, 3.0, 6.0]]
    assert change(merged).tolist() == [[0.75, 0.5, 0.5], [5.0, 3.0, 6.0]]


def test_one_rank_for_all_that_the_weakest_holds(make_task: Tasks) -> None:
    task = make_task(shares=(1.0, 8.0), momentum=0.0)
    method = FedLoRA(task, FedLoRA.Options(ranks=(1, 2, 300)))
    assert {one.rank for one in method.trained()} == {method.main.rank} != {300}
    assert FedLoRA(make_task(), FedLoRA.Options(ranks=(1, 2, 300))).main == Rank(300)


def test_only_adapters_and_head_travel(make_task: Tasks, federate: Callable[..., State]) -> None:
    method = FedLoRA(make_task(), FedLoRA.Options(ranks=(2,)))
    base = {name: t.clone() for name, t in method.submodels.base.state_dict().items()}
    state = federate(method, rounds=1)
    assert state.tensors.keys() == {
        *("blocks.0.linear" + DOWN, "blocks.0.linear" + UP, "head.weight", "head.bias")
    }
    moved = method.setup().tensors
    assert all(not torch.equal(state.tensors[name], moved[name]) for name in moved)
    for name, tensor in method.submodels.base.state_dict().items():
        assert torch.equal(tensor, base[name]), name


@pytest.mark.parametrize("share", [0.2, 3.0])
def test_layers_by_bytes(make_task: Tasks, share: float) -> None:
    task = make_task(args={"hidden": [20] * 5}, shares=(share,))
    method = FedLoRA(task, FedLoRA.Options(ranks=(1,), depths=(1, 2, 4)))
    few, some, every = (method.peak(Rank(1, depth)) for depth in (1, 2, 0))
    assert few < some < every
    assert method.depths == (1, 2, 0)  # 4 are all.
    assert [method.largest(memory).depth for memory in (few, some - 1, some, every, None)] == [
        *(1, 1, 2, 0, 0)
    ]
