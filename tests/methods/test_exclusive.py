from collections.abc import Callable

import pytest
import torch

from conftest import devices_of
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import BudgetTooSmall
from sizewise.exchange.plan import Update
from sizewise.methods.exclusive import Exclusive
from sizewise.training.task import Task


def test_only_the_strong_take_part(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", shares=(0.5, 1))
    method = Exclusive(task)
    state, runner = method.setup(), DeviceRunner(method, dataset, partition)
    weak, *strong = devices_of(task)
    with pytest.raises(BudgetTooSmall, match=f"needs {task.budgets[1]:,} bytes"):
        method.plan(state, weak, 0)
    updates = [runner.train(state, method.plan(state, device, 0)) for device in strong]
    merged = method.merge(state, updates).tensors  # type: ignore[arg-type]
    one, other = updates
    assert isinstance(one, Update)
    assert isinstance(other, Update)
    for name, tensor in merged.items():
        mean = (10 * one.tensors[name] + 15 * other.tensors[name]) / 25
        torch.testing.assert_close(tensor, mean)
    assert not method.options.ignores_budgets
    assert list(method.deploy(state)) == ["full"]
