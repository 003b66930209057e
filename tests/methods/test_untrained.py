"""What nobody trained keeps its bits, in every method: on no CPU may a mean of copies move it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rounds import do_round
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import BudgetTooSmall
from sizewise.exchange.plan import Update
from sizewise.exchange.rows import with_rows
from sizewise.exchange.state import State
from sizewise.exchange.view import grid
from sizewise.fleet.devices import Device
from sizewise.methods import find, names
from sizewise.models.preresnet import PreActivationBlock
from sizewise.surgery.anatomy import Staged
from sizewise.training.task import Task

Tasks = Callable[..., Task]
FROZEN = "2.conv1.weight"
OPTIONS: dict[str, dict[str, Any]] = {"fedgkt": {"client": f"{__name__}:Partly"}}
SERVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"server": "fedavgm", "server_lr": 0.7, "server_momentum": 0.9},
}


class Partly(Staged):
    """A residual network with a frozen layer, and a parameter that its forward never reads."""

    def __init__(self, classes: int, image: tuple[int, int, int]) -> None:
        stem = nn.Sequential(nn.Conv2d(image[0], 6, 3, padding=1, bias=False))
        blocks = [PreActivationBlock(6, 6, 1) for _ in range(4)]
        head = nn.Sequential(
            nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
        )
        super().__init__(stem, blocks, head)
        self.blocks[2].spare = nn.Parameter(torch.randn(500))
        self.get_parameter(f"blocks.{FROZEN}").requires_grad_(False)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", names())
def test_what_nobody_trained_keeps_its_bits(
    make_task: Tasks, dataset: Dataset, partition: Partition, name: str, server: str
) -> None:
    kind = find(name)
    recipe = {"batch": 4, **kind.recipe_defaults, **SERVERS[server]}
    if name in ("hetlora", "flexlora", "flora"):
        pytest.skip("what was trained decides about all rows and columns of an adapter")
    if name == "depthfl" and server != "plain":
        pytest.skip("FedDyn takes the server's step")
    task = make_task(f"{__name__}:Partly", {}, rounds=4, shares=(0.5, 1.0, 3.0), **recipe)
    method = kind(replace(task, devices=3), kind.Options(**OPTIONS.get(name, {})))
    runner, state = DeviceRunner(method, dataset, partition), method.setup()
    start = state
    weak, strong, rich = task.budgets
    rounds = [
        [Device(0, "weak", weak, ratio=0.5, turn=0), Device(1, "weak", weak, ratio=0.5, turn=1)],
        [
            Device(0, "weak", weak, ratio=0.5, turn=2),
            Device(1, "strong", strong, ratio=1.0, turn=3),
        ],
        [Device(n, "rich", rich, ratio=3.0, turn=n) for n in range(3)],
        [Device(2, "weak", weak, ratio=0.5, turn=5)],
    ]
    for round_index, devices in enumerate(rounds):
        able = [device for device in devices if fits(method, state, device, round_index)]
        assert able or round_index != 2
        before = state
        state, updates = do_round(runner, state, round_index, able)
        if name != "fedgkt":  # Its server trains a model of its own, all of it.
            untouched(before, state, covered(runner, before, updates))
    for tensor in state.tensors:
        if FROZEN in tensor or "spare" in tensor:
            assert same_bits(start.tensors[tensor], state.tensors[tensor]), tensor


def fits(method: Any, state: State, device: Device, round_index: int) -> bool:
    try:
        method.plan(state, device, round_index)
    except BudgetTooSmall:
        return False
    return True


def covered(runner: DeviceRunner, state: State, updates: list[Update]) -> dict[str, Tensor]:
    """Return which entries of the server's tensors some device sent."""
    masks = {n: torch.zeros(t.shape, dtype=torch.bool) for n, t in state.tensors.items()}
    for update in updates:
        view = with_rows(
            runner.method.submodels.view(update.plan.submodel), update.rows, state.tensors
        )
        for place in (view[local] for local in update.tensors):
            kept = ... if place.index is None else grid(place.index, masks[place.name].shape)
            masks[place.name][kept] = True
    return masks


def untouched(before: State, after: State, masks: dict[str, Tensor]) -> None:
    for name, mask in masks.items():
        assert same_bits(before.tensors[name][~mask], after.tensors[name][~mask]), name


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.numpy().tobytes() == right.numpy().tobytes()
