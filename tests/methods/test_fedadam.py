from collections.abc import Callable

import pytest
import torch

from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.exchange.state import State
from sizewise.fleet.devices import Device
from sizewise.methods.fedadam import FedAdam
from sizewise.methods.fedavg import FedAvg
from sizewise.training.task import Task


def after_a_round(method: FedAvg, state: State, dataset: Dataset, partition: Partition) -> State:
    runner = DeviceRunner(method, dataset, partition)
    plans = [method.plan(state, Device(device, "any"), 0) for device in range(2)]
    updates = [runner.train(state, plan) for plan in plans]
    return method.merge(state, updates)  # type: ignore[arg-type]


def test_server_takes_the_mean_step_as_a_gradient(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    numbers = {"server_lr": 0.1, "server_momentum": 0.5, "server_beta2": 0.75, "server_tau": 0.01}
    average, adam = FedAvg(make_task()), FedAdam(make_task(server="fedadam", **numbers))
    state = adam.setup()
    first, second = {}, {}
    for _ in range(2):
        mean = after_a_round(average, State(state.tensors), dataset, partition).tensors
        old, state = state, after_a_round(adam, state, dataset, partition)
        for name, tensor in old.tensors.items():
            step = mean[name] - tensor
            first[name] = 0.5 * first.get(name, 0) + 0.5 * step
            second[name] = 0.75 * second.get(name, 0) + 0.25 * step * step
            expected = tensor + 0.1 * first[name] / (second[name].sqrt() + 0.01)
            torch.testing.assert_close(state.tensors[name], expected)
            torch.testing.assert_close(state.server_state[f"first/{name}"], first[name])
            torch.testing.assert_close(state.server_state[f"second/{name}"], second[name])


@pytest.mark.parametrize("server", ["fedadam", "fedadamw", "fedyogi", "fedadagrad", "fedavgm"])
def test_norm_statistics_are_averaged_not_adapted(
    server: str, make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    average = FedAvg(make_task("cnn", norm="tracked"))
    adaptive = FedAdam(make_task("cnn", norm="tracked", server=server, server_lr=0.5))
    state = average.setup()
    expected = after_a_round(average, state, dataset, partition).tensors
    found = after_a_round(adaptive, state, dataset, partition).tensors
    for name in state.tensors:
        is_statistic = "running" in name or "num_batches" in name
        assert torch.equal(found[name], expected[name]) == is_statistic


def test_step_size_starts_at_a_hundredth() -> None:
    assert FedAdam.recipe_defaults == {"server": "fedadam", "server_lr": 0.01}
