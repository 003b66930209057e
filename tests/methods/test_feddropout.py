from collections.abc import Callable
from typing import Any

import pytest
import torch

from sizewise.cutting.verification import verify
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.errors import ConfigError
from sizewise.exchange.state import State
from sizewise.fleet.devices import Device
from sizewise.methods.feddropout import FedDropout, Subset
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def make(task: Task, **options: Any) -> FedDropout:
    return FedDropout(task, FedDropout.Options(**{"widths": (0.5,), **options}))


def subset(
    method: FedDropout, device: int, round_index: int, width: float = 0.5
) -> tuple[int, ...]:
    """Return the units of the first hidden layer that a device trains."""
    submodel = method.choose(width, Device(device, "any"), round_index)
    return tuple(method.submodels.kept(submodel)["stem.linear.weight:0"].tolist())


@pytest.fixture
def wide(make_task: Tasks) -> Task:
    return make_task(args={"hidden": [32, 32]})


def test_subsets_are_fresh_for_each_device_and_round(wide: Task) -> None:
    method = make(wide)
    drawn = [subset(method, device, r) for device in range(4) for r in range(4)]
    assert len(set(drawn)) == 16
    assert all(len(channels) == 16 and list(channels) == sorted(channels) for channels in drawn)
    assert drawn == [subset(make(wide), device, r) for device in range(4) for r in range(4)]


def test_devices_can_share_the_subset_of_a_round(wide: Task) -> None:
    method = make(wide, subsets="round")
    assert len({subset(method, device, 3) for device in range(5)}) == 1
    assert len({subset(method, 0, r) for r in range(5)}) == 5
    assert set(subset(method, 0, 3, 0.25)) < set(subset(method, 1, 3, 0.5))


def test_subsets_can_come_from_a_pool(wide: Task) -> None:
    method = make(wide, subsets="pool", pool=3)
    drawn = [subset(method, device, r) for device in range(6) for r in range(10)]
    assert len(set(drawn)) == 3
    assert all(drawn.count(channels) > 8 for channels in set(drawn))


def test_layers_draw_their_own_subsets(wide: Task) -> None:
    method = make(wide)
    kept = method.submodels.kept(method.choose(0.5, Device(0, "any"), 0))
    assert not torch.equal(kept["stem.linear.weight:0"], kept["blocks.0.linear.weight:0"])


def test_whole_model_has_no_draw(wide: Task) -> None:
    assert make(wide, widths=(1,)).choose(1.0, Device(0, "any"), 3) == Subset()


def test_residual_streams_run_as_if_the_others_were_masked(make_task: Tasks) -> None:
    method = make(make_task("preresnet8"), widths=(0.25,))
    submodel = method.choose(0.25, Device(1, "any"), 2)
    verify(
        method.task.build(),
        method.task.channels,
        method.submodels.kept(submodel),
        torch.randn(3, 1, 4, 4),
    )


def test_full_model_is_deployed(
    make_task: Tasks, federate: Callable[..., State], dataset: Dataset, partition: Partition
) -> None:
    method = FedDropout(make_task("cnn", {"layers": [8, 8]}, shares=(0.25, 0.5)))
    state = federate(method, 2)
    assert list(method.deploy(state)) == ["full"]
    assert (
        LocalEngine(DeviceRunner(method, dataset, partition)).evaluate(state)["full"].samples == 12
    )


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.pool must be at least 1, not 0"):
        FedDropout.Options(pool=0)
