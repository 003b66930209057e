"""Shared fixtures: one thread, tiny images of three classes, and a task that trains in no time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch

import browser
from adapter_runs import adapted as adapted
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.fleet.devices import Device
from sizewise.runs.preparation import bytes_of_ratio
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

# A busy machine must not fail a test for being slow.
hypothesis.settings.register_profile("sizewise", deadline=None)
hypothesis.settings.load_profile("sizewise")

IMAGE = (1, 4, 4)
CLASSES = 3


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Give every test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Page]:
    """A page in a real browser, where there is one."""
    program = browser.find()
    if program is None:
        pytest.skip("no Chromium is installed; set CHROME to its program")
    with browser.started(program) as opened:
        yield opened


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    """30 training and 12 test images; each class is bright in its own row."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % CLASSES
        images = torch.randint(0, 120, (count, *IMAGE), generator=generator, dtype=torch.uint8)
        images[torch.arange(count), 0, labels] += 100
        return images, labels

    return Dataset("tiny", *draw(30), *draw(12), ("a", "b", "c"), (0.3,), (0.2,))


@pytest.fixture(scope="session")
def partition() -> Partition:
    """Three devices with 5, 10 and 15 of the 30 samples."""
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    return Partition(order, torch.tensor([0, 5, 15, 30]))


@pytest.fixture(scope="session")
def make_task() -> Callable[..., Task]:
    """Return a maker of tasks: a small perceptron by default, recipe values as keywords.

    `shares` gives the fleet's budgets, as widths of the model whose training step they hold.
    """

    def make(
        model: str = "mlp",
        args: dict[str, Any] | None = None,
        seed: int = 0,
        rounds: int = 3,
        shares: Sequence[float] = (),
        **recipe: Any,
    ) -> Task:
        if args is None:
            args = {"mlp": {"hidden": [6, 5]}, "cnn": {"layers": [4, 6]}}.get(model, {})
        chosen = Recipe(**{"lr": 0.05, "batch": 4, "eval_batch": 6, **recipe})
        task = Task(ModelConfig(model, args), chosen, IMAGE, CLASSES, seed, rounds)
        if not shares:
            return task
        budgets = tuple(bytes_of_ratio(task, share) for share in shares)
        return replace(task, budgets=budgets, ratios=tuple(shares))

    return make


def devices_of(task: Task) -> list[Device]:
    """Return three devices with the budgets of a task, the last one's for any further ones."""
    kinds = list(zip(task.budgets, task.ratios or [None], strict=True))
    kinds += kinds[-1:] * (3 - len(kinds))
    return [
        Device(number, f"{ratio}", memory, ratio=ratio)
        for number, (memory, ratio) in enumerate(kinds)
    ]


def do_round(runner: DeviceRunner, state: State, round_index: int) -> tuple[State, list[Update]]:
    """Train all three devices; return the next state and what they sent."""
    method, devices = runner.method, devices_of(runner.method.task)
    plans = [
        method.plan(state, replace(device, turn=3 * round_index + device.id), round_index)
        for device in devices
    ]
    updates = list(LocalEngine(runner).train(state, plans))
    assert all(isinstance(update, Update) for update in updates), updates
    return method.merge(state, updates), updates  # type: ignore[arg-type, return-value]


@pytest.fixture(scope="session")
def federate(dataset: Dataset, partition: Partition) -> Callable[..., State]:
    """Return a function that runs a method for some rounds, all three devices in each."""

    def run(method: Method, rounds: int = 2) -> State:
        runner, state = DeviceRunner(method, dataset, partition), method.setup()
        for round_index in range(rounds):
            state, _ = do_round(runner, state, round_index)
        return state

    return run
