"""Predicted bytes against another truth than our own meter: what an allocator handed out."""

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch

import second_device
from lever_cases import MODELS, RECIPES, batch, built, checkpoints
from sizewise import models
from sizewise.memory.prediction import Meter, predict
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import training_step
from sizewise.torch_tools.placement import moved, placed

# Torch takes a fused cell for these wherever it is not on a CPU, and the second device has none.
NAMES = [name for name in MODELS if name not in ("lstm", "gru")]


@pytest.fixture(scope="module", autouse=True)
def _second_device() -> None:
    second_device.load()


@pytest.fixture(autouse=True)
def _no_garbage_is_collected() -> Iterator[None]:
    """What others left behind must not be given back while bytes are counted."""
    gc.disable()
    yield
    gc.enable()


def allocated(name: str, recipe: Recipe, levers: Levers) -> int:
    """Return the most bytes that the device handed out for two steps of a model."""
    before, there = torch.accelerator.memory_allocated(), torch.device("secondary:0")
    module, (inputs, labels) = placed(built(name), there), moved(batch(name), there)
    optimizer = make_optimizer(recipe, list(module.parameters()), recipe.lr, levers)
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(2):
        training_step(module, optimizer, inputs, labels, levers=levers)
    return torch.accelerator.max_memory_allocated() - before


def predicted(name: str, recipe: Recipe, levers: Levers) -> int:
    return predict(
        built(name),
        *moved(batch(name), torch.device("meta")),
        optimizer=partial(make_optimizer, recipe, lr=recipe.lr, levers=levers),
        step=partial(training_step, levers=levers),
        device=torch.device("secondary:0"),
    ).peak


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_predicted_is_what_is_allocated(name: str, recipe: str) -> None:
    chosen = RECIPES[recipe]
    assert predicted(name, chosen, NONE) == allocated(name, chosen, NONE)


@pytest.mark.parametrize("name", NAMES)
def test_levers(name: str) -> None:
    frugal = [
        checkpoints(name),
        Levers(micro_batch=2),
        Levers(step_in_backward=True),
        Levers(state="bfloat16"),
        Levers(activations="bfloat16"),
    ]
    for levers in frugal:
        recipe = RECIPES["adam"]
        assert predicted(name, recipe, levers) == allocated(name, recipe, levers), levers.label


def test_a_sum_of_gradients_takes_less_while_nobody_looks() -> None:
    """Where two ways meet, torch adds gradients in place, but not under a dispatch mode.

    A meter is one. So a residual net may need less than is metered: at most a hidden tensor.
    """
    recipe, there = Recipe(), torch.device("secondary:0")
    images, labels = torch.randn(16, 3, 16, 16), torch.zeros(16, dtype=torch.int64)
    make = partial(make_optimizer, recipe, lr=recipe.lr)
    before = torch.accelerator.memory_allocated()
    module = placed(models.build("preresnet8", classes=10, image=(3, 16, 16)), there)
    batch = moved((images, labels), there)
    optimizer = make(list(module.parameters()))
    training_step(module, optimizer, *batch)
    torch.accelerator.reset_peak_memory_stats()
    training_step(module, optimizer, *batch)
    taken = torch.accelerator.max_memory_allocated() - before
    with Meter(device=there) as meter:
        meter.track(module, optimizer, batch)
        training_step(module, optimizer, *batch)
    expected = predict(module, *moved(batch, torch.device("meta")), optimizer=make, device=there)
    assert expected.peak == meter.peak
    assert 0 < meter.peak - taken <= 4 * 16 * 16 * 16 * 16  # (B, C, H, W) behind the stem.
