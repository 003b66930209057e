from collections.abc import Callable
from typing import Literal

import pytest
import torch

from conftest import devices_of, do_round
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import ConfigError
from sizewise.exchange.view import cut, grid
from sizewise.fleet.devices import Device
from sizewise.methods.fedrolex import FedRolex, Window
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def channels(method: FedRolex, round_index: int, name: str) -> list[int]:
    """Return the rows of a tensor that a device without limits trains in a round."""
    plan = method.plan(method.setup(), Device(0, "any"), round_index)
    index = method.submodels.view(plan.submodel)[name].index
    assert index is not None
    size = method.task.channels.tensors[name][0].size
    return torch.arange(size)[index[0]].tolist()  # type: ignore[no-any-return]


def test_window_rolls_by_one_each_round(make_task: Tasks) -> None:
    method = FedRolex(make_task(args={"hidden": [4, 8]}), FedRolex.Options(widths=(0.5,)))
    small = [channels(method, r, "stem.linear.weight") for r in range(5)]
    assert small == [[0, 1], [1, 2], [2, 3], [0, 3], [0, 1]]
    assert channels(method, 5, "blocks.0.linear.weight") == [0, 5, 6, 7]


def test_layers_along_a_residual_stream_share_their_window(make_task: Tasks) -> None:
    options = FedRolex.Options(widths=(0.25,), stride="group")
    method = FedRolex(make_task("preresnet8"), options)
    view = method.submodels.view(method.plan(method.setup(), Device(0, "any"), 7).submodel)
    stem, first, second = (
        view[f"{name}.weight"].index for name in ("stem.conv", "blocks.0.conv1", "blocks.0.conv2")
    )
    assert str(stem[0]) == str(first[1]) == str(second[0])  # type: ignore[index]


def test_submodels_of_a_width_share_their_size_whatever_the_round(make_task: Tasks) -> None:
    method = FedRolex(make_task(), FedRolex.Options(widths=(0.5, 1)))
    state = method.setup()
    windows = [method.choose(0.5, Device(0, "any"), r) for r in (0, 3)]
    assert {window.label for window in windows} == {"width 0.5"}
    assert windows == [Window(0.5, 0), Window(0.5, 3)]
    assert method.plan(state, Device(0, "any"), 3).submodel == Window(), "all is in every window"


@pytest.mark.parametrize(("stride", "complete"), [("common", False), ("group", True)])
def test_strides_of_their_own_cover_everything(
    stride: Literal["common", "group"], complete: bool, make_task: Tasks
) -> None:
    options = FedRolex.Options(widths=(0.25,), stride=stride)
    method = FedRolex(make_task(args={"hidden": [8, 8]}), options)
    state = method.setup()
    seen = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in state.tensors.items()}
    for round_index in range(64):
        plan = method.plan(state, Device(0, "any"), round_index)
        for place in method.submodels.view(plan.submodel).values():
            kept = ... if place.index is None else grid(place.index, seen[place.name].shape)
            seen[place.name][kept] = True
    assert all(mask.all() for mask in seen.values()) == complete
    assert seen["stem.linear.weight"].all(), "one dimension alone is always covered"


def test_a_model_larger_than_every_device_is_trained_and_deployed_whole(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", {"layers": [4, 4]}, shares=(0.25, 0.5), momentum=0.0)
    method = FedRolex(task)
    runner, state = DeviceRunner(method, dataset, partition), method.setup()
    start = state.tensors
    assert [method.plan(state, d, 0).submodel.label for d in devices_of(task)[:2]] == [
        "width 0.25",
        "width 0.5",
    ]
    for round_index in range(4):
        state, _ = do_round(runner, state, round_index)
    assert list(method.deploy(state)) == ["full"]
    module = method.deploy(state)["full"].fill()
    assert module.get_parameter("stem.conv.weight").shape == (4, 1, 3, 3)
    # After as many rounds as there are channels, every one of them was trained.
    moved = state.tensors["stem.conv.weight"] != start["stem.conv.weight"]
    assert moved.flatten(1).any(1).all()


def test_a_window_is_cut_as_it_is_named(make_task: Tasks) -> None:
    method = FedRolex(make_task(args={"hidden": [4, 4]}), FedRolex.Options(widths=(0.5,)))
    state = method.setup()
    submodel = method.plan(state, Device(0, "any"), 3).submodel
    weight = state.tensors["blocks.0.linear.weight"]
    found = cut(state.tensors, method.submodels.view(submodel))["blocks.0.linear.weight"]
    assert torch.equal(found, weight[[0, 3]][:, [0, 3]])


@pytest.mark.parametrize("policy", ["per_width_stats", "per_submodel"])
def test_norms_that_nobody_trains_are_refused(policy: str, make_task: Callable[..., Task]) -> None:
    with pytest.raises(ConfigError, match="runs the full model, whose own norms nobody trains"):
        FedRolex(make_task("cnn", norm=policy))
