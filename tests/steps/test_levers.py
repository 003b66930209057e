"""Levers change the bytes of a step, and what it computes as little as each of them says."""

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lever_cases import MODELS, RECIPES, batch, built, checkpoints, same_bits, stepped
from sizewise.common.structure import build
from sizewise.errors import ConfigError, ModelError
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.parts import divided
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import IGNORED, compare, cross_entropy, training_step
from sizewise.torch_tools import keeping

ALL = Levers(4, True, ("blocks",), False, "bfloat16", "bfloat16")


def test_levers_are_plain_values() -> None:
    assert Levers() == NONE
    assert len({NONE, Levers(), ALL}) == 2
    assert build(Levers, json.loads(json.dumps(dataclasses.asdict(ALL)))) == ALL
    assert NONE.label == "none"
    assert ALL.label == "parts of 4, checkpointed, bf16 state, bf16 activations"
    assert [ALL.parts(size) for size in (1, 4, 5, 32, 33)] == [1, 1, 2, 8, 9]
    assert NONE.parts(32) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"micro_batch": 0}, "at least 1"), ({"blocks": ("stem",)}, "only levers.checkpoint")],
)
def test_levers_that_mean_nothing_are_refused(options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Levers(**options)


def test_which_levers_a_recipe_allows() -> None:
    backward, recipe = Levers(step_in_backward=True), Recipe(batch=32)
    assert ALL.allowed(replace(recipe, clip=1.0), terms=3)
    assert backward.allowed(recipe)
    assert replace(backward, micro_batch=32).allowed(recipe)
    assert not replace(backward, micro_batch=31).allowed(recipe)
    assert not backward.allowed(replace(recipe, clip=1.0))
    assert "2 terms" in (backward.objection(recipe, terms=2) or "")


# ---- parts


def gradients(module: nn.Module, data: Any, levers: Levers, **options: Any) -> list[Tensor]:
    """Return the gradient of a step that moves nothing, and the loss."""
    optimizer = make_optimizer(
        Recipe(momentum=0.0, weight_decay=0.0), [*module.parameters()], 1e-30
    )
    value = training_step(module, optimizer, *data, levers=levers, **options)
    return [value, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("size", [1, 2, 4, 5])  # Of six: parts of 2 and 2 and 2, 3 and 3.
@pytest.mark.parametrize("name", ["group norm", "mlp", "encoder", "gru", "vit"])
def test_gradients_of_parts_add_up_to_that_of_the_batch(name: str, size: int) -> None:
    module = built(name)
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    data = batch(name)
    expected = gradients(copy.deepcopy(module), data, NONE)
    found = gradients(module, data, Levers(micro_batch=size))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_ignored_tags_do_not_count() -> None:
    module, inputs = nn.Linear(5, 4), torch.randn(6, 3, 5)
    tags = torch.randint(0, 4, (6, 3))
    tags[0, 1:] = tags[3] = tags[4] = tags[5, 0] = IGNORED  # A part of two texts has no tag at all.
    expected = gradients(copy.deepcopy(module), (inputs, tags), NONE)
    for size in (1, 2, 4):
        found = gradients(copy.deepcopy(module), (inputs, tags), Levers(micro_batch=size))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_scores_tuples_and_several_terms_in_parts() -> None:
    module, scores = nn.Linear(5, 1), torch.rand(7)
    inputs = torch.randn(7, 5), torch.randn(14, 5)

    def terms(module: nn.Module, pair: tuple[Tensor, Tensor], scores: Tensor) -> Iterator[Tensor]:
        yield compare(module(pair[0]), scores)
        yield module(pair[1]).square().mean()

    expected = gradients(copy.deepcopy(module), (inputs, scores), NONE, loss=terms)
    found = gradients(module, (inputs, scores), Levers(micro_batch=1), loss=terms)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_a_loss_that_looks_at_its_gradients_sees_those_of_its_part() -> None:
    module, data = nn.Linear(5, 3), (torch.randn(6, 5), torch.arange(6) % 3)

    def terms(module: nn.Module, inputs: Tensor, labels: Tensor) -> Iterator[Tensor]:
        assert all(parameter.grad is None for parameter in module.parameters())
        yield cross_entropy(module, inputs, labels)
        module.zero_grad(set_to_none=True)  # As FjORD's prediction does with narrower widths.
        yield cross_entropy(module, inputs, labels)

    expected = gradients(copy.deepcopy(module), data, NONE)[1:]
    found = gradients(module, data, Levers(micro_batch=2), loss=terms)[1:]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_parts_are_views_of_nearly_the_same_size() -> None:
    inputs, labels = torch.randn(11, 2), torch.arange(11)
    parts = list(divided(inputs, labels, 4))
    assert [len(part) for part, _, _ in parts] == [4, 4, 3]
    assert torch.equal(torch.cat([some for _, some, _ in parts]), labels)
    storage = inputs.untyped_storage().data_ptr()
    assert {part.untyped_storage().data_ptr() for part, _, _ in parts} == {storage}
    assert sum(share for *_, share in parts) == 1
    (whole,) = divided(inputs, labels, 11)
    assert whole[0] is inputs


def test_parts_of_something_else_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor"):
        list(divided(1, None, 4))
    with pytest.raises(ConfigError, match="has 2 rows"):
        list(divided((torch.zeros(8, 3), torch.zeros(2)), torch.zeros(8), 2))


# ---- checkpoints


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_gives_the_same_bits(name: str, kind: str) -> None:
    plain, twice = built(name), built(name)
    expected = stepped(plain, name, NONE, RECIPES[kind])
    assert stepped(twice, name, checkpoints(name), RECIPES[kind]) == expected
    assert same_bits(plain, twice)  # Running statistics and their counts are among them.


@pytest.mark.parametrize("name", ["cnn", "preresnet", "densenet", "depthwise"])
@pytest.mark.parametrize("momentum", [0.1, None, "no statistics"])
def test_batch_norm_counts_every_batch_once(name: str, momentum: Any) -> None:
    def norms() -> nn.Module:
        module = built(name)
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d) and momentum == "no statistics":
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            elif isinstance(layer, nn.BatchNorm2d):
                layer.momentum = momentum
        return module

    plain, twice = norms(), norms()
    stepped(plain, name, NONE, RECIPES["momentum"])
    stepped(twice, name, checkpoints(name), RECIPES["momentum"])
    assert same_bits(plain, twice)
    counts = [b for n, b in twice.named_buffers() if n.endswith("num_batches_tracked")]
    assert all(count == 3 for count in counts)
    assert bool(counts) == (momentum != "no statistics")


# ---- the step in the backward pass


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_the_backward_pass_gives_the_same_bits(name: str, kind: str) -> None:
    plain, moved = built(name), built(name)
    levers = Levers(step_in_backward=True)
    assert stepped(moved, name, levers, RECIPES[kind]) == stepped(plain, name, NONE, RECIPES[kind])
    assert same_bits(plain, moved)
    assert all(parameter.grad is None for parameter in moved.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in moved.parameters())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_with_a_proximal_term_ties_and_unused_parameters(checkpoint: bool) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
        layers[2][0].weight = layers[0][0].weight
        module = nn.Sequential(*layers)
        module.register_parameter("spare", nn.Parameter(torch.ones(3)))
        return module

    data = torch.randn(5, 6), torch.arange(5)
    found = []
    for levers in (NONE, Levers(step_in_backward=True, checkpoint=checkpoint)):
        module = tied()
        learning = list(module.parameters())
        anchors = [torch.full_like(parameter, 0.1) for parameter in learning]
        optimizer = make_optimizer(Recipe(), learning, 0.1)
        for _ in range(3):
            training_step(module, optimizer, *data, anchors, proximal=0.3, levers=levers)
        found.append(module)
    assert same_bits(*found)


def test_what_cannot_be_moved_in_the_backward_pass() -> None:
    module, data, levers = built("mlp"), batch("mlp"), Levers(step_in_backward=True)
    ours = make_optimizer(Recipe(), list(module.parameters()), 0.1)

    def terms(*given: Any) -> Iterator[Tensor]:
        yield cross_entropy(*given)

    before = copy.deepcopy(module)
    with pytest.raises(ConfigError, match="one term"):
        training_step(module, ours, *data, loss=terms, levers=levers)
    with pytest.raises(ConfigError, match="optimiser of sizewise"):
        training_step(module, torch.optim.SGD(module.parameters()), *data, levers=levers)
    assert same_bits(module, before)

    bias = nn.ParameterList([torch.zeros(3)])

    def torn(module: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        first: Tensor = (module[0] + inputs).sum()

        @torch.enable_grad()
        def more(_: Tensor) -> None:
            module[0].sum().backward()

        first.register_hook(more)
        return first

    with pytest.raises(ModelError, match="came in two parts"):
        training_step(
            bias,
            make_optimizer(Recipe(), [*bias], 0.1),
            *torch.ones(2, 3),
            loss=torn,
            levers=levers,
        )


# ---- bfloat16


@pytest.mark.parametrize("kind", ["momentum", "adam", "amsgrad"])
def test_state_in_bfloat16_stays_close(kind: str) -> None:
    recipe = RECIPES.get(kind, Recipe(optimizer="amsgrad", lr=1e-3))
    plain, half = built("mlp"), built("mlp")
    start = built("mlp")
    stepped(plain, "mlp", NONE, recipe, steps=20)
    stepped(half, "mlp", Levers(state="bfloat16"), recipe, steps=20)
    for first, expected, found in zip(
        start.parameters(), plain.parameters(), half.parameters(), strict=True
    ):
        moved = (expected - first).norm()
        assert (found - expected).norm() < 0.03 * moved
    assert not same_bits(plain, half)


def test_state_is_half_as_large_and_can_be_recalled() -> None:
    weights = nn.Parameter(torch.randn(10))
    for recipe, kinds in ((Recipe(), 1), (Recipe(optimizer="adam"), 2)):
        optimizer = make_optimizer(recipe, [weights], 0.1, Levers(state="bfloat16"))
        weights.grad = torch.randn(10)
        optimizer.step()
        moments = optimizer.moments(["weights"])
        half = [tensor for tensor in moments.values() if tensor.dtype == torch.bfloat16]
        assert len(half) == kinds
        again = make_optimizer(recipe, [weights], 0.1, Levers(state="bfloat16"))
        again.recall(["weights"], moments)
        assert all(again.moments(["weights"])[key] is tensor for key, tensor in moments.items())
        full = make_optimizer(recipe, [weights], 0.1)
        full.recall(["weights"], moments)
        assert {tensor.dtype for tensor in full.moments(["weights"]).values()} == {torch.float32}


def test_second_moments_in_bfloat16_do_not_stand_still() -> None:
    """Rounded to the nearest they would: a step changes them by less than half a step of theirs."""
    squares = []
    for levers in (NONE, Levers(state="bfloat16")):
        weights = nn.Parameter(torch.zeros(50))
        optimizer = make_optimizer(Recipe(optimizer="adam"), [weights], 1e-3, levers)
        for step in range(1500):  # Gradients that are large at first, and small later.
            weights.grad = torch.linspace(1, 2, 50) * (10.0 if step < 300 else 0.1)
            optimizer.step()
        squares.append(optimizer.state[weights]["square"].float())
    # They would end at three times what they should be.
    torch.testing.assert_close(squares[1], squares[0], rtol=0.06, atol=0.0)


@pytest.mark.parametrize("name", MODELS)
def test_activations_in_bfloat16_give_close_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "SMALL", 500)
    data, found = batch(name), []
    for levers in (NONE, Levers(activations="bfloat16")):
        module = built(name)
        torch.manual_seed(3)
        found.append(gradients(module, data, levers))
    assert found[0][0] == found[1][0]  # The forward pass is the same.
    whole, half = (torch.cat([g.flatten() for g in gradient[1:]]) for gradient in found)
    assert (half - whole).norm() < 0.02 * whole.norm()
    assert name in ("mlp", "encoder") or not torch.equal(half, whole)


def test_checkpoints_in_bfloat16_are_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SMALL", 100)
    data, found = batch("preresnet"), []
    for levers in (NONE, Levers(checkpoint=True, activations="bfloat16")):
        found.append(gradients(built("preresnet"), data, levers))
    whole, half = (torch.cat([g.flatten() for g in gradient[1:]]) for gradient in found)
    assert 0 < (half - whole).norm() < 0.1 * whole.norm()


def test_levers_do_not_import_the_compiler() -> None:
    code = """
import sys, torch
from torch import nn
from sizewise.steps.levers import Levers
from sizewise.steps.optimizers import Adam, Sgd
from sizewise.steps.step import training_step
module = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Dropout()) for _ in range(3)))
data = torch.ones(8, 9), torch.arange(8)
for levers in (Levers(4, True, (), False, "bfloat16", "bfloat16"), Levers(step_in_backward=True)):
    for kind in (Sgd, Adam):
        optimizer = kind([*module.parameters()], memory=levers.state)
        training_step(module, optimizer, *data, levers=levers)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
