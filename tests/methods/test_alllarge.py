from collections.abc import Callable

import torch

from conftest import devices_of
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.families.submodels import Width
from sizewise.fleet.devices import Device
from sizewise.methods.alllarge import AllLarge
from sizewise.methods.fedavg import FedAvg
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def test_everybody_trains_the_full_model_whatever_it_costs(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", shares=(0.5, 1))
    method = AllLarge(task)
    state = method.setup()
    plan = method.plan(state, devices_of(task)[0], 0)
    assert (plan.submodel, plan.budget, plan.predicted) == (Width(), None, task.budgets[1])
    update = DeviceRunner(method, dataset, partition).train(state, plan)
    assert isinstance(update, Update)
    assert update.peak_bytes is not None, "it is still metered"
    assert method.options.ignores_budgets
    assert method.plan(state, Device(0, "tiny", 1), 0).predicted == plan.predicted


def test_budgets_make_no_difference(make_task: Tasks, federate: Callable[..., State]) -> None:
    expected = federate(FedAvg(make_task("cnn"))).tensors
    found = federate(AllLarge(make_task("cnn", shares=(0.25, 0.5, 1)))).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
