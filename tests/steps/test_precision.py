"""Precision: the same step in 16 bits, in the bytes that were predicted, and as accurate."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lever_cases import MODELS, RECIPES, batch, built, checkpoints
from sizewise import config as configs
from sizewise.errors import ConfigError
from sizewise.memory.prediction import Meter, predict
from sizewise.runs import session
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.precision import Precision, computed_in, scaler
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import cross_entropy, training_step
from sizewise.torch_tools.placement import HOST, moved
from sizewise.training.loop import make_step


def metered(name: str, step: Any, recipe: Recipe, levers: Levers) -> int:
    module, inputs = built(name), batch(name)
    optimizer = make_optimizer(recipe, list(module.parameters()), recipe.lr, levers)
    meter = Meter()
    for _ in range(2):
        with meter:
            meter.track(module, optimizer, inputs)
            step(module, optimizer, *inputs)
    return meter.peak


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("lstm", "gru")])
def test_what_is_predicted_is_metered(name: str, precision: Precision) -> None:
    recipe = Recipe(precision=precision, lr=0.05)
    for levers in (NONE, checkpoints(name)) if precision == "bf16" else (NONE,):
        found = predict(
            built(name),
            *moved(batch(name), torch.device("meta")),
            optimizer=partial(make_optimizer, recipe, lr=recipe.lr, levers=levers),
            step=make_step(recipe, cross_entropy, levers),
        ).peak
        assert found == metered(name, make_step(recipe, cross_entropy, levers), recipe, levers)


def test_activations_are_smaller() -> None:
    peaks = {
        precision: metered("cnn", partial(training_step, precision=precision), RECIPES["sgd"], NONE)
        for precision in ("float32", "bf16")
    }
    assert peaks["bf16"] < 0.8 * peaks["float32"]


def test_every_term_of_a_loss_is_computed_in_it_and_nothing_between() -> None:
    module, seen = nn.Linear(2, 2), []

    def terms(module: nn.Module, inputs: torch.Tensor, targets: Any) -> Any:
        for _ in range(2):
            out = module(inputs)
            seen.append(out.dtype)
            yield out.float().sum()

    for term in computed_in("bf16", terms)(module, torch.ones(1, 2), None):
        assert not torch.is_autocast_enabled("cpu")
        term.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_a_step_with_gradients_that_are_not_finite_is_left_out() -> None:
    module = nn.Linear(1, 1)
    before = module.weight.detach().clone()
    optimizer = make_optimizer(RECIPES["sgd"], list(module.parameters()), 0.1)
    scales = scaler("fp16", HOST)
    assert scales is not None

    def loss(module: nn.Module, inputs: torch.Tensor, targets: Any) -> torch.Tensor:
        return module(inputs).sum() * float(targets)

    for factor, moves in ((float("inf"), False), (1.0, True)):
        step = partial(training_step, loss=loss, precision="fp16", scaler=scales)
        step(module, optimizer, torch.ones(1, 1), factor)
        assert torch.equal(module.weight, before) is not moves
    assert torch.isfinite(module.weight).all()
    assert scales.get_scale() == 512


def test_precisions_that_cannot_be_used_are_refused() -> None:
    config = configs.from_dict({"recipe": {"precision": "tf32"}})
    with pytest.raises(ConfigError, match="'tf32' is for CUDA"), session.started(config):
        pass
    moved_early = Levers(step_in_backward=True)
    assert "use 'bf16'" in str(moved_early.objection(Recipe(precision="fp16")))


@pytest.mark.parametrize("method", ["heterofl", "fedin", "fedgkt", "fedepth", "splitmix"])
def test_methods_train_in_it(method: str, tmp_path: Any) -> None:
    client = {"client": "cnn", "client_args": {"layers": [4, 6]}, "server_epochs": 1}
    config = configs.from_dict(
        {
            "rounds": 2,
            "model": {"name": "cnn", "args": {"layers": [4, 6, 6]}},
            "data": {"train_limit": 60, "test_limit": 30},
            "fleet": {"devices": 3, "per_round": 3, "ratios": [2.0]},
            "method": {"name": method, **(client if method == "fedgkt" else {})},
            "recipe": {"precision": "bf16", "batch": 8, "eval_batch": 30},
        }
    )
    with session.started(config, tmp_path / "run") as federation:
        assert not federation.run()["refused"]
