"""What FeDepth must do, whatever its code: what is frozen, what is linked, what is sent.

What needs no method is with what it tests:

    decompositions           test_accounting.py, test_decompositions_of_fedepth
    the toy example          test_packing.py, test_toy_example_of_fedepth
    those of a method        test_fedepth_schedule.py, test_decompositions_of_the_paper
    the formula for M models test_fedepth.py, test_mutual_loss_by_hand
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from depth_cases import make_runner, make_task, plan_for, start, train, whole_peak
from sizewise.exchange.plan import Plan
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.fedepth import FeDepth
from sizewise.methods.fedepth.blocks import Blocks, Run
from sizewise.methods.m_fedepth import MFeDepth
from sizewise.surgery.links import skip_link


def rounds(method: Method, budget: int | None) -> State:
    runner, state = make_runner(method), method.setup()
    for number in range(2):
        plans = [method.plan(state, Device(device, "any", budget), number) for device in range(3)]
        state = method.merge(state, [train(runner, state, plan) for plan in plans])
    return state


@pytest.mark.parametrize("kind", [FeDepth, MFeDepth])
def test_one_run_of_all_blocks_is_fedavg_bit_for_bit(kind: type[FeDepth]) -> None:
    task = make_task(epochs=2, norm="tracked", clip=1.0, augment="crop-flip")
    expected = rounds(FedAvg(task), None).tensors
    fedepth = kind(task, kind.Options(models=1))
    for budget in (None, whole_peak(fedepth)):
        found = rounds(fedepth, budget).tensors
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_taken_apart_into_one_run_it_is_fedavg_bit_for_bit() -> None:
    task = make_task(epochs=2)
    fedepth = FeDepth(task)
    plan = plan_for(fedepth, [(0, 4)], device=2)
    found = train(make_runner(fedepth), fedepth.setup(), plan).tensors
    average = FedAvg(task)
    state = average.setup()
    expected = train(make_runner(average), state, average.plan(state, Device(2, "any"), 0)).tensors
    assert found.keys() == {f"model.{name}" for name in expected}
    assert all(torch.equal(found[f"model.{name}"], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"link": "conv"}, {"heads": "auxiliary"}], ids=str)
def test_frozen_tensors_are_bit_identical(options: dict[str, Any]) -> None:
    # Momentum and weight decay are on. After its stage, no block moves any more.
    task = make_task(epochs=2, momentum=0.9, weight_decay=0.1, norm="tracked")
    fedepth = FeDepth(task, FeDepth.Options(**options))
    plan = plan_for(fedepth, [(0, 1), (1, 2), (2, 4)])
    state, runner = start(fedepth, plan), make_runner(fedepth)
    earlier = [train(runner, state, replace(plan, stages=plan.stages[: n + 1])) for n in range(3)]
    for after, update in enumerate(earlier):
        for name, tensor in update.tensors.items():
            frozen = name.startswith(("model.stem", "model.blocks", "exits"))
            for later in earlier[after + 1 :]:
                if frozen:
                    assert torch.equal(later.tensors[name], tensor), name
        learned = f"model.blocks.{after}.conv1.weight"
        assert not torch.equal(
            update.tensors[learned], state.tensors[learned.removeprefix("model.")]
        )


@pytest.mark.parametrize(("channels", "side", "zeros"), [(16, 32, 24), (32, 16, 16), (64, 8, 0)])
def test_the_link_leads_to_64_channels_of_8_by_8(channels: int, side: int, zeros: int) -> None:
    x = torch.rand(2, channels, side, side) + 0.1
    y = skip_link(x, (64, 8, 8))
    assert y.shape == (2, 64, 8, 8)
    inside = y[:, zeros : 64 - zeros]
    assert torch.equal(inside, x[:, :, :: side // 8, :: side // 8])
    assert int((y != 0).sum()) == inside.numel() == 2 * channels * 64


def test_the_link_of_preresnet20_is_that_one() -> None:
    fedepth = FeDepth(make_task("preresnet20", image=(3, 32, 32)))
    assert tuple(fedepth.task.hidden_shapes[-1]) == (64, 8, 8)
    kinds = [tuple(shape) for shape in dict.fromkeys(fedepth.task.hidden_shapes)]
    assert kinds == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_stage_leaves_later_blocks_as_they_were_received(stages: int) -> None:
    fedepth = FeDepth(make_task(weight_decay=0.1, norm="tracked"))
    plan = plan_for(fedepth, [(0, 1), (1, 2), (2, 3)][:stages])
    state = start(fedepth, plan)
    update = train(make_runner(fedepth), state, plan)
    own = fedepth.submodels.module(plan.submodel).state_dict()
    for number in range(4):
        for name, tensor in state.tensors.items():
            if name.startswith(f"blocks.{number}."):
                if number >= stages:
                    assert torch.equal(own[f"model.{name}"], tensor), name
                assert (f"model.{name}" in update.tensors) == (number < stages)


def test_only_the_first_model_is_sent() -> None:
    fedepth = FeDepth(make_task(), FeDepth.Options(models=3))
    schedule = fedepth.scheduler.regular(2)
    plan = Plan(0, 0, "rich", schedule.submodel, (replace(schedule.stages[0], lr=0.05),))
    state = fedepth.setup()
    assert fedepth.submodels.view(plan.submodel).keys() == {
        f"model.{name}" for name in state.tensors
    }
    update = train(make_runner(fedepth), state, plan)
    assert update.tensors.keys() == fedepth.submodels.view(plan.submodel).keys()
    assert update.device_state.keys() == {
        f"peers.{number}.{name}" for number in (0, 1) for name in state.tensors
    }
    assert fedepth.merge(state, [update]).tensors.keys() == state.tensors.keys()


def test_a_model_learns_from_the_other_not_the_other_way_round() -> None:
    # Where the other is sure and it is not, KL(other || self) pulls hard, KL(self || other) not.
    fedepth = FeDepth(make_task())
    schedule = fedepth.scheduler.regular(1)
    (stage,) = schedule.stages
    whole: Any = fedepth.submodels.copy(schedule.submodel).module
    logits = {"model": torch.tensor([[0.0, 0.0, 0.0]]), "peer": torch.tensor([[4.0, 0.0, -4.0]])}
    own, other = (value.requires_grad_() for value in logits.values())
    assert isinstance(stage.work, Run)
    blocks = stage.work.blocks
    assert blocks is not None

    class Given:
        model, peers = whole.model, whole.peers

        def __call__(self, inputs: object, blocks: Blocks, model: object) -> torch.Tensor:
            return own if model is whole.model else other

    loss: Any = fedepth.loss(schedule.submodel, stage, None)
    assert blocks.learn == (0, 1, 2, 3)
    loss(Given(), torch.empty(1), torch.tensor([0])).backward()
    p, q = other.detach().softmax(1), own.detach().softmax(1)
    target = torch.tensor([[1.0, 0.0, 0.0]])
    torch.testing.assert_close(own.grad, (q - target) + (q - p))
    torch.testing.assert_close(other.grad, (p - target) + (p - q))
