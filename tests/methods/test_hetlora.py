"""HetLoRA: toy numbers of padding, weighting and pruning."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from conftest import devices_of
from low_rank import LARGE, LAYER, SERVER, SMALL, view
from sizewise.exchange.plan import Update
from sizewise.families.lora.adapters import DOWN, UP, Rank
from sizewise.methods.hetlora import HetLoRA, Padded, Pruned
from sizewise.steps.step import cross_entropy
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def test_toy_numbers() -> None:
    merging = Padded(SERVER)
    merging.add(SMALL, view(1), 100.0)  # Samples do not count.
    merging.add(LARGE, view(2), 1.0)
    small, large = math.sqrt(5), math.sqrt(12)  # The norms of the two products.
    p, q = small / (small + large), large / (small + large)
    merged = merging.result()
    down = torch.tensor([[p, 2 * p + q, q], [2 * q, 0.0, 0.0]])
    torch.testing.assert_close(merged[LAYER + DOWN], down)
    torch.testing.assert_close(merged[LAYER + UP], torch.tensor([[p + 2 * q, 0.0], [0.0, q]]))


def test_what_nobody_has_learned_stays() -> None:
    merging = Padded(SERVER)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in SMALL.items()}
    merging.add(nothing, view(1), 1.0)
    merged = merging.result()
    assert all(torch.equal(merged[name], SERVER[name]) for name in SERVER)


def test_a_rank_shrinks_if_its_end_does(make_task: Tasks) -> None:
    method = HetLoRA(make_task(), HetLoRA.Options(ranks=(4,), keep=0.6))
    state, device = method.setup(), devices_of(replace(method.task, ratios=(1.0,)))[0]
    layer = "blocks.0.linear"
    ones = {name: torch.ones_like(tensor) for name, tensor in state.tensors.items()}
    state = replace(state, tensors=ones)
    plan = method.plan(state, device, 0)
    assert plan.submodel == Rank(4)
    smaller = {layer + DOWN: torch.ones(4, 6), layer + UP: torch.ones(5, 4)}
    grown = Update(plan, {**smaller, layer + UP: 2 * torch.ones(5, 4)}, 1, 1, 0.0)
    after = method.merge(state, [grown])
    assert after.facts(Pruned).ranks == {}
    smaller[layer + UP][:, 2:] = 0.5
    after = method.merge(state, [Update(plan, smaller, 1, 1, 0.0)])
    assert after.facts(Pruned).ranks == {"0": 2}  # floor(0.6 * 4)
    assert method.plan(after, device, 1).submodel == Rank(2)


@pytest.mark.parametrize(("keep", "penalised"), [(0.5, True), (1.0, False)])
def test_the_penalty_is_on_the_end_alone(make_task: Tasks, keep: float, penalised: bool) -> None:
    method = HetLoRA(make_task(), HetLoRA.Options(ranks=(2,), keep=keep, penalty=0.5))
    module = method.submodels.build(Rank(2))
    nn.init.constant_(module.get_parameter("blocks.0.linear" + DOWN), 3.0)
    nn.init.constant_(module.get_parameter("blocks.0.linear" + UP), 1.0)
    images, labels = torch.randn(2, 1, 4, 4), torch.tensor([0, 1])
    plain = cross_entropy(module, images, labels)
    value = method.loss(Rank(2), method.task.stage(), None)(module, images, labels)
    # The last row of A, six 3s, and the last column of B, five 1s.
    extra = 0.5 * math.sqrt(6 * 9) * math.sqrt(5) if penalised else 0.0
    assert float((value - plain).detach()) == pytest.approx(extra, rel=1e-5)
