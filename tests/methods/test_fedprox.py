from collections.abc import Callable

import torch

from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.exchange.plan import Update
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.fedprox import FedProx
from sizewise.training.task import Task


def update_of(method: FedAvg, dataset: Dataset, partition: Partition) -> Update:
    state = method.setup()
    plan = method.plan(state, Device(2, "any"), 0)
    update = DeviceRunner(method, dataset, partition).train(state, plan)
    assert isinstance(update, Update)
    return update


def distance(method: FedAvg, update: Update) -> float:
    start = method.setup().tensors
    return sum(float((t - start[name]).square().sum()) for name, t in update.tensors.items()) ** 0.5


def test_without_pull_it_is_fedavg_bit_for_bit(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", epochs=2)
    average = update_of(FedAvg(task), dataset, partition).tensors
    proximal = update_of(FedProx(task), dataset, partition).tensors
    assert average.keys() == proximal.keys()
    assert all(torch.equal(average[name], proximal[name]) for name in average)


def test_pull_keeps_a_device_near_what_it_received(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    distances = []
    for mu in (0.0, 0.1, 1.0, 10.0):
        method = FedProx(make_task(proximal=mu, epochs=3, weight_decay=0.0, momentum=0.0))
        distances.append(distance(method, update_of(method, dataset, partition)))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.5 * distances[0]


def test_mu_starts_at_a_hundredth() -> None:
    assert FedProx.recipe_defaults == {"proximal": 0.01}
