"""IN training: what learns from which loss, and how gradients are joined."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mixed_models import deep
from sizewise.data.augment import Transform
from sizewise.methods.fedin.intermediate import (
    Lesson,
    ignore,
    imitation,
    joined,
    project_off,
    single,
)
from sizewise.steps.step import backpropagate
from sizewise.surgery.anatomy import Anatomy, anatomy

IMAGE = (1, 4, 4)


@pytest.fixture
def model() -> nn.Module:
    return deep(3, IMAGE, norm=False)


@pytest.fixture
def split(model: nn.Module) -> Anatomy:
    return anatomy(model)


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(4, *IMAGE), torch.tensor([0, 1, 2, 1]), torch.randn(4, 6), torch.randn(4, 5)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def separate(model: nn.Module, weight: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of L_local and of L_IN, taken one at a time, by the textbook."""
    images, labels, early, late = batch()
    parts: Any = model
    both = []
    for loss in (
        F.cross_entropy(model(images), labels),
        weight * (nn.Sequential(*parts.blocks)(early) - late).square().mean(),
    ):
        model.zero_grad()
        loss.backward()
        both.append(gradients(model))
    model.zero_grad(set_to_none=True)
    return both[0], both[1]


def join(model: nn.Module, split: Anatomy, project: bool, weight: float = 1.0) -> dict[str, Tensor]:
    images, labels, early, late = batch()
    inputs = (images, early, late)
    terms = joined(model, inputs, labels, split, ignore, weight=weight, project=project)
    value = backpropagate(terms)
    assert value.isfinite()
    return gradients(model)


def test_extractor_and_classifier_get_no_gradient_from_the_in_loss(
    model: nn.Module, split: Anatomy
) -> None:
    _, _, early, late = batch()
    backpropagate(imitation(model, early, late, split))
    assert {name.partition(".")[0] for name in gradients(model)} == {"blocks"}


@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_the_sum_rule_is_the_gradient_of_the_summed_loss(
    model: nn.Module, split: Anatomy, weight: float
) -> None:
    torch.manual_seed(3)
    own, others = separate(model, weight)
    torch.manual_seed(3)
    found = join(model, split, project=False, weight=weight)
    assert found.keys() == own.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, own[name] + others.get(name, 0))


def test_the_projection_rule_takes_out_what_works_against_the_local_loss(
    split: Anatomy,
) -> None:
    agreed = 0
    for seed in range(8):
        torch.manual_seed(seed)
        model = deep(3, IMAGE, norm=False)
        torch.manual_seed(seed)
        g, h = separate(model, 5.0)
        torch.manual_seed(seed)
        found = join(model, split, project=True, weight=5.0)
        inner = sum(float((h[n] * g[n]).sum()) for n in h)
        size = sum(float((g[n] * g[n]).sum()) for n in h)
        agreed += inner >= 0
        for name in g:
            if name not in h:
                expected = g[name]  # The ends see the local loss alone.
            else:
                expected = h[name] if inner >= 0 else h[name] - inner / size * g[name]
            torch.testing.assert_close(found[name], expected)
        assert sum(float((found[n] * g[n]).sum()) for n in h) >= -1e-6 * size
    assert 0 < agreed < 8


def test_projection_by_hand() -> None:
    h, g = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    project_off([h], [g])
    torch.testing.assert_close(h, torch.tensor([0.5, 0.5]))
    h = torch.tensor([1.0, 0.0])
    project_off([h, torch.tensor([2.0])], [-g, None])
    torch.testing.assert_close(h, torch.tensor([1.0, 0.0]))
    project_off([h], [torch.zeros(2)])
    torch.testing.assert_close(h, torch.tensor([1.0, 0.0]))


@given(st.lists(st.tuples(*[st.floats(-9, 9, width=32)] * 2), min_size=1, max_size=6))
def test_the_result_never_works_against_the_local_gradient(
    numbers: list[tuple[float, float]],
) -> None:
    h, g = (torch.tensor(column) for column in zip(*numbers, strict=True))
    size = float(g.square().sum())
    project_off([h], [g])
    assert float((h * g).sum()) >= -1e-4 * (1 + size)


def test_the_step_of_the_sequential_rule_is_one_loss_at_a_time(
    model: nn.Module, split: Anatomy
) -> None:
    images, labels, early, late = batch()
    noted: list[Tensor] = []

    def note(*features: Tensor) -> None:
        noted.extend(features)

    value = single(model, (images,), labels, split, note, weight=3.0)
    assert isinstance(value, Tensor)
    torch.testing.assert_close(value, F.cross_entropy(model(images), labels))
    assert [tuple(tensor.shape) for tensor in noted] == [(4, 6), (4, 5)]
    assert not any(tensor.requires_grad for tensor in noted)
    value = single(model, (early,), late, split, note, weight=3.0)
    parts: Any = model
    expected = 3 * (nn.Sequential(*parts.blocks)(early) - late).square().mean()
    torch.testing.assert_close(value, expected)


def lesson(**options: Any) -> Lesson:
    images = torch.arange(10, dtype=torch.uint8).reshape(10, 1, 1, 1).expand(-1, *IMAGE)
    transform = Transform("none", (0.0,), (1 / 255,))
    return Lesson(images, torch.arange(10), torch.arange(1, 8), transform, **options)


def test_pairs_come_beside_each_batch_or_after_it() -> None:
    pairs = (torch.zeros(2, 6), torch.ones(2, 5))
    beside = list(lesson(pairs=pairs).batches(3, torch.Generator().manual_seed(0)))
    # Seven samples; the last one alone is passed by.
    assert [(len(inputs), len(labels)) for inputs, labels in beside] == [(3, 3), (3, 3)]
    assert all(inputs[1] is pairs[0] and inputs[2] is pairs[1] for inputs, _ in beside)
    apart = list(lesson(pairs=pairs, apart=True).batches(3, torch.Generator().manual_seed(0)))
    assert len(apart) == 4
    for (inputs, labels), ((images, *_), truth) in zip(apart[::2], beside, strict=True):
        assert torch.equal(labels, truth)
        assert torch.equal(inputs[0], images)
    assert all(inputs == (pairs[0],) and late is pairs[1] for inputs, late in apart[1::2])
    alone = list(lesson().batches(3, torch.Generator().manual_seed(0)))
    assert [len(inputs) for inputs, _ in alone] == [1, 1]


def test_the_last_batch_of_full_size_is_noted_and_held() -> None:
    pairs = (torch.zeros(2, 6), torch.ones(2, 5))
    learned = lesson(pairs=pairs, full=3)
    assert len(learned.held) == 2
    for rows in (3, 3, 1):
        learned.note(torch.full((rows, 6), float(rows)), torch.zeros(rows, 5))
    assert learned.seen[0].shape == (3, 6)
    assert learned.held == (*pairs, *learned.seen)
