"""Shared fixtures: one thread, tiny images of three classes, and a task that trains in no time."""

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch

from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.recipe import Recipe
from sizewise.task import ModelConfig, Task

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
    """Return a maker of tasks: a small perceptron by default, recipe values as keywords."""

    def make(
        model: str = "mlp",
        args: dict[str, Any] | None = None,
        seed: int = 0,
        rounds: int = 3,
        **recipe: Any,
    ) -> Task:
        if args is None:
            args = {"mlp": {"hidden": [6, 5]}, "cnn": {"layers": [4, 6]}}.get(model, {})
        chosen = Recipe(**{"lr": 0.05, "batch": 4, "eval_batch": 6, **recipe})
        return Task(ModelConfig(model, args), chosen, IMAGE, CLASSES, seed, rounds)

    return make
