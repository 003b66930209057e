from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.site import Site
from sizewise.fleet import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.local import Local
from sizewise.plan import Update
from sizewise.state import State
from sizewise.task import Task


def train(site: Site, state: State, device: int, round_index: int) -> Update:
    update = site.train(state, site.method.plan(state, Device(device, "any"), round_index))
    assert isinstance(update, Update)
    return update


@pytest.fixture
def site(make_task: Callable[..., Task], dataset: Dataset, partition: Partition) -> Site:
    return Site(Local(make_task("cnn", norm="tracked")), dataset, partition)


def test_server_never_changes_and_nothing_is_sent(site: Site) -> None:
    state = site.method.setup()
    updates = [train(site, state, device, 0) for device in range(3)]
    assert all(update.tensors == {} for update in updates)
    merged = site.method.merge(state, updates)
    assert all(merged.tensors[name] is tensor for name, tensor in state.tensors.items())
    assert Local.discloses == frozenset()


def test_device_goes_on_from_its_own_model(site: Site, make_task: Callable[..., Task]) -> None:
    state = site.method.setup()
    first = train(site, state, 1, 0)
    second = train(site, replace(state, devices={1: first.memory}), 1, 1)
    # The same two rounds of FedAvg with this device alone.
    average = Site(FedAvg(make_task("cnn", norm="tracked")), site.dataset, site.partition)
    alone = train(average, State(first.memory), 1, 1)
    assert second.memory.keys() == alone.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(second.memory[n], alone.tensors[n]) for n in alone.tensors)
    assert not torch.equal(first.memory["head.linear.weight"], second.memory["head.linear.weight"])


def test_first_round_starts_from_the_common_weights(
    site: Site, make_task: Callable[..., Task]
) -> None:
    state = site.method.setup()
    average = Site(FedAvg(make_task("cnn", norm="tracked")), site.dataset, site.partition)
    expected = train(average, state, 0, 0).tensors
    found = train(site, state, 0, 0).memory
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_device_that_trained_is_deployed(site: Site) -> None:
    state = site.method.setup()
    assert list(site.method.deploy(state)) == ["full"]
    memories = {device: train(site, state, device, 0).memory for device in (2, 0)}
    deployed = site.method.deploy(replace(state, devices=memories))
    assert list(deployed) == ["device 0", "device 2"]
    for device, memory in memories.items():
        found = deployed[f"device {device}"]().state_dict()
        assert all(torch.equal(found[name], memory[name]) for name in memory)


def test_headline_is_the_mean_over_devices(site: Site) -> None:
    assert site.method.headline({"device 0": 0.2, "device 2": 0.6}) == pytest.approx(0.4)
