"""FLoRA: what is merged is the exact mean of what devices learned."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conftest import do_round
from low_rank import LARGE, LAYER, SERVER, SMALL, change, view
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.families.lora.adapters import DOWN, UP, pairs, product
from sizewise.families.lora.method import LowRank
from sizewise.methods.fedlora import FedLoRA
from sizewise.methods.flora import STACKED_DOWN, STACKED_UP, FLoRA, Stacks
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def test_toy_numbers() -> None:
    empty = {LAYER + STACKED_DOWN: torch.zeros(0, 3), LAYER + STACKED_UP: torch.zeros(2, 0)}
    merging = Stacks({**SERVER, **empty})
    merging.add(SMALL, view(1), 1.0)
    merging.add(LARGE, view(2), 3.0)
    merged = merging.result()
    # Three rows would be more than the two outputs have directions.
    assert merged[LAYER + STACKED_DOWN].shape == (2, 3)
    exact = (change(SMALL) + 3 * change(LARGE)) / 4
    assert exact.tolist() == [[0.25, 2.0, 1.5], [1.5, 0.0, 0.0]]
    found = merged[LAYER + STACKED_UP] @ merged[LAYER + STACKED_DOWN]
    torch.testing.assert_close(found, exact)
    assert not merged[LAYER + UP].any()


def test_stacks_are_factors_one_behind_the_other() -> None:
    wide = {LAYER + DOWN: torch.ones(1, 5), LAYER + UP: torch.ones(4, 1)}
    before = {LAYER + STACKED_DOWN: torch.full((1, 5), 2.0), LAYER + STACKED_UP: torch.ones(4, 1)}
    merging = Stacks({**wide, **before})
    merging.add(wide, view(1), 1.0)
    merging.add(wide, view(1), 3.0)
    merged = merging.result()
    assert merged[LAYER + STACKED_DOWN][:, 0].tolist() == [2.0, 1.0, 1.0]
    assert merged[LAYER + STACKED_UP][0].tolist() == [1.0, 0.25, 0.75]


def learned(method: LowRank, dataset: Dataset, partition: Partition) -> tuple[State, list[Update]]:
    return do_round(DeviceRunner(method, dataset, partition), method.setup(), 0)


def weights(method: LowRank, state: State, layer: str) -> Tensor:
    """Return the weights of a layer of the deployed model, its adapter merged."""
    module = list(method.deploy(state).values())[-1].fill()
    (_, down, up), *_ = pairs(dict(module.named_parameters()))
    scale = method.options.scale
    inner = module.get_parameter(f"{layer}.base_layer.weight")
    return (inner + scale * product(down, up)).detach()


@pytest.mark.parametrize(("kind", "exact"), [(FLoRA, True), (FedLoRA, False)])
def test_the_merged_model_is_the_mean_of_full_updates(
    make_task: Tasks, dataset: Dataset, partition: Partition, kind: type[LowRank], exact: bool
) -> None:
    task = make_task(args={"hidden": [12, 9]}, lr=0.5)
    method = kind(task, kind.Options(ranks=(3,)))
    state, updates = learned(method, dataset, partition)
    (layer,) = method.submodels.places.targets(0)
    base = method.submodels.base.get_parameter(f"{layer}.weight").clone()
    full = torch.zeros_like(base)
    for update in updates:
        ((_, down, up),) = pairs(update.tensors)
        full += update.samples * method.options.scale * product(down, up)
    expected = base + full / sum(update.samples for update in updates)
    found = weights(method, state, layer)
    assert float((expected - base).abs().max()) > 1e-3
    assert (float((found - expected).abs().max()) < 1e-6) is exact


def test_devices_begin_anew_each_round(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    method = FLoRA(make_task(), FLoRA.Options(ranks=(2,)))
    runner, state = DeviceRunner(method, dataset, partition), method.setup()
    drawn = []
    for round_index in range(3):
        (layer,) = method.submodels.places.targets(0)
        assert not state.tensors[layer + UP].any()
        drawn.append(state.tensors[layer + DOWN])
        state, _ = do_round(runner, state, round_index)
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    # Three devices of rank 2 in three rounds; the layer has five outputs.
    assert state.tensors[layer + STACKED_DOWN].shape == (5, 6)


def test_a_base_that_rounds_is_refused(make_task: Tasks) -> None:
    with pytest.raises(ConfigError, match="would round it away"):
        FLoRA(make_task(), FLoRA.Options(base="int8"))
    with pytest.raises(ConfigError, match="makes new factors in every round"):
        FLoRA(make_task(server="fedadam"))


def test_what_looks_at_single_entries_is_refused(make_task: Tasks) -> None:
    with pytest.raises(ConfigError, match="looks at single entries; use 'mean', or fedlora"):
        FLoRA(make_task(merge="median"))
    assert FLoRA(make_task()).unclipped() is not None
    assert FedLoRA(make_task(merge="median")).unclipped() is None
