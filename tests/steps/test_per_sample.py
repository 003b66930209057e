"""Gradients clipped sample by sample: by hand, against autograd, and what one sample moves."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sizewise.errors import ConfigError
from sizewise.steps import per_sample
from sizewise.steps.levers import Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.per_sample import PerSample
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import cross_entropy, training_step

SILENT = 1e-30
RECIPE = Recipe(lr=1.0, momentum=0.0, weight_decay=0.0)


def stepped(
    module: nn.Module, inputs: Tensor, labels: Tensor, private: PerSample, **more: Any
) -> tuple[list[Tensor], float]:
    """Return by how much a step with a rate of 1 moves the parameters, and its loss."""
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = make_optimizer(RECIPE, list(module.parameters()), 1.0)
    value = training_step(module, optimizer, inputs, labels, private=private, **more)
    after = [p.detach() for p in module.parameters()]
    return [new - old for new, old in zip(after, before, strict=True)], float(value)


def squared(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return half of the mean squared error, whose gradients are easy."""
    return (module(inputs).squeeze(-1) - targets).square().mean() / 2


def test_by_hand() -> None:
    line = nn.Linear(1, 1, bias=False)
    line.weight.data.fill_(0.0)
    # Gradients -x y are -6 and -0.5: the first is clipped to -1.
    inputs, targets = torch.tensor([[2.0], [1.0]]), torch.tensor([3.0, 0.5])
    (moved,), value = stepped(line, inputs, targets, PerSample(1.0, SILENT), loss=squared)
    assert moved.item() == pytest.approx((1.0 + 0.5) / 2)
    assert value == pytest.approx((4.5 + 0.125) / 2)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def reference(module: nn.Module, inputs: Tensor, labels: Tensor, clip: float) -> list[Tensor]:
    """Return the mean of clipped gradients, computed for one sample after the other."""
    total = [torch.zeros_like(p) for p in module.parameters()]
    for number in range(len(labels)):
        some = slice(number, number + 1)
        loss = cross_entropy(module, inputs[some], labels[some])
        own = torch.autograd.grad(loss, list(module.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in own))
        for sofar, gradient in zip(total, own, strict=True):
            sofar += gradient * min(1.0, clip / norm)
    return [t / len(labels) for t in total]


@pytest.mark.parametrize("levers", [Levers(), Levers(micro_batch=2), Levers(checkpoint=True)])
@pytest.mark.parametrize("clip", [0.1, 0.7, 100.0])
def test_it_is_the_mean_of_clipped_gradients_in_any_parts(clip: float, levers: Levers) -> None:
    module, inputs, labels = network(), torch.randn(7, 4), torch.arange(7) % 3
    levers = replace(levers, blocks=("0",)) if levers.checkpoint else levers
    expected = reference(module, inputs, labels, clip)
    moved, _ = stepped(module, inputs, labels, PerSample(clip, SILENT), levers=levers)
    for one, two in zip(moved, expected, strict=True):
        torch.testing.assert_close(one, -two)


def test_several_terms_of_one_sample_are_clipped_together() -> None:
    def twice(module: nn.Module, inputs: Tensor, labels: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            yield cross_entropy(module, inputs, labels)

    inputs, labels = torch.randn(3, 4), torch.tensor([0, 1, 2])
    moved, _ = stepped(network(), inputs[:1], labels[:1], PerSample(0.1, SILENT), loss=twice)
    assert float(torch.cat([m.flatten() for m in moved]).norm()) == pytest.approx(0.1, rel=1e-4)


@settings(max_examples=30)
@given(
    scale=st.floats(1e-3, 1e3),
    clip=st.sampled_from([0.01, 1.0, 10.0]),
    size=st.integers(2, 6),
    seed=st.integers(0, 100),
)
def test_one_sample_moves_the_sum_by_at_most_the_clip(
    scale: float, clip: float, size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(size, 4, generator=generator)
    labels = torch.randint(3, (size,), generator=generator)
    private = PerSample(clip, SILENT)
    with_it, _ = stepped(network(), inputs, labels, private)
    without, _ = stepped(network(), inputs[1:], labels[1:], private)
    pairs = zip(with_it, without, strict=True)
    moved = torch.cat([(size * a - (size - 1) * b).flatten() for a, b in pairs])
    # Weights are of float32, and the sums are read off their differences.
    assert float(moved.norm()) <= clip * (1 + 1e-3) + 1e-4


def test_a_sample_that_is_not_finite_adds_nothing() -> None:
    inputs, labels = torch.randn(3, 4), torch.tensor([0, 1, 2])
    expected = reference(network(), inputs[:2], labels[:2], 1.0)
    inputs[2] = math.nan
    moved, _ = stepped(network(), inputs, labels, PerSample(1.0, SILENT))
    for one, two in zip(moved, expected, strict=True):
        torch.testing.assert_close(one, -two * 2 / 3)


def test_noise_is_on_all_that_learns_also_without_a_gradient() -> None:
    module = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(100, 100, bias=False)])

    def first(modules: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(modules[0], inputs, labels)

    private = PerSample(2.0, 3.0, torch.Generator().manual_seed(0))
    moved, _ = stepped(module, torch.randn(5, 4), torch.zeros(5).long(), private, loss=first)
    assert float(moved[1].std()) == pytest.approx(2.0 * 3.0 / 5, rel=0.03)


def test_noise_differs_from_stage_to_stage_and_follows_a_seed() -> None:
    recipe = Recipe(sample_clip=1.0, sample_noise=1.0, sample_seed=3)

    def drawn(recipe: Recipe, times: int = 2) -> list[float]:
        batches, found = torch.Generator().manual_seed(7), []
        for _ in range(times):
            private = per_sample.make(recipe, batches, torch.device("cpu"))
            assert private is not None
            found.append(float(torch.randn((), generator=private.generator)))
        return found

    assert drawn(recipe) == drawn(recipe)
    assert len({*drawn(recipe), *drawn(replace(recipe, sample_seed=4))}) == 4
    secret = replace(recipe, sample_seed=None)
    assert drawn(secret) != drawn(secret)
    assert per_sample.make(Recipe(), torch.Generator(), torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"sample_clip": 1.0}, "give both, or neither"),
        ({"sample_noise": 1.0}, "give both, or neither"),
        ({"sample_clip": 0.0, "sample_noise": 1.0}, "must be positive"),
        ({"sample_clip": 1.0, "sample_noise": 0.0}, "at least 1e-6"),
        ({"sample_clip": 1.0, "sample_noise": 1.0, "precision": "fp16"}, "use 'bf16'"),
        ({"sample_delta": 0.0}, "between 0 and 1"),
    ],
)
def test_what_a_recipe_cannot_hold_is_said(values: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Recipe(**values)


def test_moving_in_the_backward_pass_does_not_go_with_it() -> None:
    recipe = Recipe(sample_clip=1.0, sample_noise=1.0)
    assert "sample_clip" in (Levers(step_in_backward=True).objection(recipe) or "")
