"""Every lever, alone and together with others, takes exactly the bytes that were predicted."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lever_cases import BATCH, MODELS, RECIPES, batch, built, checkpoints
from sizewise import models
from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.plan import TrainingStage
from sizewise.memory import prediction
from sizewise.memory.meter import Meter, OutOfBudget
from sizewise.memory.prediction import cost, predict
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import training_step
from sizewise.torch_tools import keeping
from sizewise.training.loop import Shard, fit

HALF = Levers(activations="bfloat16", state="bfloat16")
ALONE = {
    "none": NONE,
    "parts": Levers(micro_batch=4),
    "backward": Levers(step_in_backward=True),
    "state": Levers(state="bfloat16"),
    "activations": Levers(activations="bfloat16"),
    "checkpoint": Levers(checkpoint=True),
}
TOGETHER = {
    "parts and half": replace(HALF, micro_batch=2),
    "backward and half": replace(HALF, step_in_backward=True),
    "checkpoint and parts": Levers(checkpoint=True, micro_batch=2),
    "checkpoint and backward": Levers(checkpoint=True, step_in_backward=True),
    "checkpoint and half": replace(HALF, checkpoint=True),
    "checkpoint, parts and half": replace(HALF, checkpoint=True, micro_batch=4),
    "checkpoint, backward and half": replace(HALF, checkpoint=True, step_in_backward=True),
}


def predicted(name: str, levers: Levers, recipe: Recipe) -> int:
    inputs, labels = (tensor.to("meta") for tensor in batch(name))
    step = partial(training_step, levers=levers)
    optimizer = partial(make_optimizer, recipe, lr=0.01, levers=levers)
    return predict(built(name), inputs, labels, step=step, optimizer=optimizer).peak


def metered(name: str, levers: Levers, recipe: Recipe, budget: int | None = None) -> int:
    module, data = built(name), batch(name)
    optimizer = make_optimizer(recipe, list(module.parameters()), 0.01, levers)
    meter = Meter(budget)
    for _ in range(2):
        with meter:
            meter.track(module, optimizer, data)
            training_step(module, optimizer, *data, levers=levers)
    return meter.peak


@pytest.mark.parametrize("levers", [*ALONE, *TOGETHER])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_is_metered(name: str, levers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SMALL", 100)  # So that tensors of these models are not too small.
    chosen = {**ALONE, **TOGETHER}[levers]
    if chosen.checkpoint:
        chosen = replace(chosen, blocks=checkpoints(name).blocks)
    for kind, recipe in RECIPES.items():
        assert predicted(name, chosen, recipe) == metered(name, chosen, recipe), kind


def test_equal_parts_that_are_not_run_cost_what_those_before_them_did() -> None:
    for size in (1, 2, 5):  # Seven, four and two parts of seven samples.
        levers, sgd = Levers(micro_batch=size, checkpoint=True), RECIPES["sgd"]
        inputs, labels = batch("vit", 7)
        found = cost(
            built("vit"),
            inputs.to("meta"),
            labels.to("meta"),
            step=partial(training_step, levers=levers),
        )
        with Meter() as meter:
            module = built("vit")
            meter.track(module, inputs, labels)
            optimizer = make_optimizer(sgd, list(module.parameters()), 0.01)
            training_step(module, optimizer, inputs, labels, levers=levers)
        whole = cost(
            built("vit"),
            inputs.to("meta"),
            labels.to("meta"),
            step=partial(training_step, levers=Levers(checkpoint=True)),
        )
        assert (found.footprint.peak, found.flops) == (meter.peak, whole.flops)


def test_a_budget_of_exactly_the_peak_passes_and_one_byte_less_does_not() -> None:
    for levers in (TOGETHER["checkpoint and parts"], TOGETHER["checkpoint and backward"]):
        peak = predicted("preresnet", levers, RECIPES["momentum"])
        assert metered("preresnet", levers, RECIPES["momentum"], peak) == peak
        with pytest.raises(OutOfBudget):
            metered("preresnet", levers, RECIPES["momentum"], peak - 1)


def test_a_proximal_step_in_the_backward_pass_is_exact() -> None:
    recipe, levers = Recipe(proximal=0.1), Levers(step_in_backward=True)
    module, data = built("mlp"), batch("mlp")
    step = partial(training_step, levers=levers, proximal=0.1)
    optimizer = partial(make_optimizer, recipe, lr=0.01)
    peak = predict(module, *data, step=step, optimizer=optimizer, anchored=True).peak
    anchors = [parameter.detach().clone() for parameter in module.parameters()]
    working = optimizer(list(module.parameters()))
    with Meter() as meter:
        meter.track(module, data, anchors)
        for _ in range(2):
            step(module, working, *data, anchors)
    assert meter.peak == peak


def test_what_each_lever_saves() -> None:
    module = models.build("preresnet20", classes=10, image=(3, 32, 32))
    inputs = torch.empty(32, 3, 32, 32, device="meta")

    def ask(levers: Levers) -> prediction.Cost:
        optimizer = partial(make_optimizer, Recipe(), lr=0.1, levers=levers)
        return cost(module, inputs, step=partial(training_step, levers=levers), optimizer=optimizer)

    plain = ask(NONE)
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert ask(Levers(micro_batch=8)).footprint.peak < 0.32 * plain.footprint.peak
    assert ask(Levers(micro_batch=8)).flops == plain.flops
    again = ask(Levers(checkpoint=True))
    assert again.footprint.peak < 0.45 * plain.footprint.peak
    assert plain.flops < again.flops < 1.25 * plain.flops  # No block's last convolution runs twice.
    assert ask(Levers(activations="bfloat16")).footprint.peak < 0.6 * plain.footprint.peak
    assert ask(Levers(state="bfloat16")).footprint.optimizer_state == weights // 2
    # Where weights are most of it, gradients are what can be spared.
    flat = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6)))
    few = [
        predict(flat, torch.empty(1, 300), step=partial(training_step, levers=levers))
        for levers in (NONE, Levers(step_in_backward=True))
    ]
    assert few[0].gradients == few[0].parameters
    assert few[1].gradients == 4 * 300 * 301  # Those of one layer.
    assert few[1].peak < 0.65 * few[0].peak


def test_levers_that_do_not_go_together_are_one_sentence() -> None:
    step = partial(training_step, levers=Levers(step_in_backward=True), clip=1.0)
    with pytest.raises(ConfigError, match=r"^levers.step_in_backward cannot .*recipe.clip"):
        predict(built("mlp"), *batch("mlp"), step=step)
    both = Levers(step_in_backward=True, micro_batch=BATCH - 1)
    with pytest.raises(ConfigError, match=r"levers.micro_batch"):
        predict(built("mlp"), *batch("mlp"), step=partial(training_step, levers=both))
    again = partial(training_step, levers=Levers(checkpoint=True))
    with pytest.raises(ModelError, match=r"^Recurrent has no list of blocks to checkpoint; name"):
        predict(built("gru"), *batch("gru"), step=again)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_devices_train_with_levers_within_what_was_predicted(optimizer: str) -> None:
    recipe = Recipe(optimizer=optimizer, lr=0.01, batch=BATCH, epochs=2)  # type: ignore[arg-type]
    images, labels = batch("cnn", 2 * BATCH + 3)
    shard = Shard(images, labels, torch.arange(len(labels)), lambda data, _: data)
    for levers in (NONE, Levers(micro_batch=3, checkpoint=True), TOGETHER["backward and half"]):
        module = built("cnn")
        peak = predicted("cnn", levers, recipe)
        meter, generator = Meter(peak), torch.Generator().manual_seed(0)
        given = (module, TrainingStage(0.01, 2, levers=levers), shard, recipe, generator)
        found = fit(*given, meter=meter, every_step=True)
        assert meter.peak == peak
        assert found.steps == 6
