"""m-FeDepth: heads of their own for runs of blocks; by hand in test_fedepth.py."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from depth_cases import VIT, make_runner, make_task, plan_for, train, whole_peak
from sizewise.engines.local import LocalEngine
from sizewise.fleet.devices import Device
from sizewise.methods import find
from sizewise.methods.fedepth import FeDepth
from sizewise.methods.fedepth.schedule import in_order
from sizewise.methods.m_fedepth import MFeDepth


def test_it_is_fedepth_with_auxiliary_heads() -> None:
    assert find("m-fedepth") is MFeDepth
    assert MFeDepth.Options() == MFeDepth.Options(heads="auxiliary")
    shared = vars(FeDepth.Options()).keys()
    assert vars(MFeDepth.Options()).keys() == shared
    task = make_task()
    same = FeDepth(task, FeDepth.Options(heads="auxiliary"))
    plans = [plan_for(method, [(0, 2), (2, 4)]) for method in (same, MFeDepth(task))]
    assert plans[0] == plans[1]
    assert plans[0].submodel.label == plans[1].submodel.label


@pytest.fixture(scope="module")
def method() -> MFeDepth:
    """A method whose fleet is of three kinds, and one that can do nothing."""
    task = make_task(epochs=1)
    peak = whole_peak(MFeDepth(task))
    budgets = (1000, *(int(share * peak) for share in (0.6, 0.8)), None)
    return MFeDepth(replace(task, budgets=budgets))


def test_the_server_has_the_heads_of_all_decompositions(method: MFeDepth) -> None:
    plans = [
        method.plan(method.setup(), Device(number, "some", memory), 0)
        for number, memory in enumerate(method.task.budgets[1:])
    ]
    ends = [plan.submodel.exits for plan in plans]
    assert ends == [(1, 2), (2,), ()]
    assert plans[0].submodel.label == "blocks 1 | 2 | 3-4"
    # The last run uses the model's own head; whoever trains the whole model has no other.
    state = method.setup()
    extra = {name for name in state.tensors if name.startswith("exits.")}
    kinds = ("0.weight", "0.bias", "4.weight", "4.bias")
    assert extra == {f"exits.{stop}.{kind}" for stop in (1, 2) for kind in kinds}
    assert state.tensors["exits.1.4.weight"].shape == (3, 4)  # At the width of its block.
    heads = [stage.trainable for stage in plans[0].stages]
    assert heads[0] == ("model.blocks.0", "model.stem", "exits.1")
    assert heads[2] == ("model.blocks.2", "model.blocks.3", "model.head")
    # Nothing is a statistic here.
    assert set(method.submodels.parameters(state, method.main)) == state.tensors.keys()


@pytest.mark.parametrize("model", [(), ("vit", {**VIT, "depth": 4})], ids=["residual", "vit"])
def test_idle_heads_cost_their_own_bytes_and_nothing_else(model: tuple) -> None:
    method = MFeDepth(make_task(*model))
    plan = plan_for(method, [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert plan.submodel.exits == (1, 2, 3)
    for stage in plan.stages:
        looked_into = method.costs.step(plan.submodel, stage)
        assert method.cost(plan.submodel, stage) == looked_into
        alone = method.submodels.without_idle_exits(plan.submodel, stage.work.blocks)
        assert method.peak(alone, stage) < looked_into.footprint.peak


def test_heads_are_averaged_over_those_who_train_them(method: MFeDepth) -> None:
    state, runner = method.setup(), make_runner(method)
    memories = method.task.budgets[1:]
    updates = [
        train(runner, state, method.plan(state, Device(number, "some", memory), 0))
        for number, memory in enumerate(memories)
    ]
    merged = method.merge(state, updates).tensors
    first, second, whole = (update.tensors for update in updates)
    assert torch.equal(merged["exits.1.4.weight"], 12 * first["exits.1.4.weight"] / 12)
    mean = (12 * first["exits.2.4.weight"] + 9 * second["exits.2.4.weight"]) / 21
    torch.testing.assert_close(merged["exits.2.4.weight"], mean)
    own = 12 * first["model.head.linear.weight"] + 9 * second["model.head.linear.weight"]
    own = (own + 15 * whole["head.linear.weight"]) / 36
    torch.testing.assert_close(merged["head.linear.weight"], own)
    # A round without them does not move them.
    later = method.merge(state, updates[2:]).tensors
    for name, tensor in state.tensors.items():
        assert torch.equal(later[name], tensor) == name.startswith("exits."), name


def test_only_the_models_own_head_is_deployed(method: MFeDepth) -> None:
    state = method.setup()
    (deployed,) = method.deploy(state).values()
    assert deployed.fill().state_dict().keys() == method.task.build().state_dict().keys()
    (score,) = LocalEngine(make_runner(method)).evaluate(state).values()
    assert score.samples == 12


def test_heads_of_different_blocks_start_differently_and_always_the_same() -> None:
    starts = []
    for runs in ([(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)]):
        method = MFeDepth(make_task())
        submodel = plan_for(method, runs).submodel
        starts.append(method.submodels.extended(method.setup(), [submodel]).tensors)
    for name in starts[1]:
        assert torch.equal(starts[0][name], starts[1][name]), name
    assert not torch.equal(starts[0]["exits.1.4.weight"], starts[0]["exits.2.4.weight"])


@pytest.mark.parametrize(("norm", "tracked"), [("batch", False), ("tracked", True)])
def test_norms_of_heads_follow_the_recipe(norm: str, tracked: bool) -> None:
    method = MFeDepth(make_task(norm=norm))
    plan = plan_for(method, [(0, 2), (2, 4)])
    state = method.submodels.extended(method.setup(), [plan.submodel])
    assert ("exits.2.0.running_mean" in state.tensors) == tracked
    assert "exits.2.0.running_mean" not in method.submodels.parameters(state, method.main)
    update = train(make_runner(method), state, plan)
    assert ("exits.2.0.running_mean" in update.tensors) == tracked
    merged = method.merge(state, [update]).tensors
    if tracked:
        assert int(merged["exits.2.0.num_batches_tracked"]) == 2


def test_tokens_have_heads_like_the_models_own() -> None:
    method = MFeDepth(make_task("vit", VIT))
    plan = plan_for(method, [(0, 1), (1, 3)])
    state = method.submodels.extended(method.setup(), [plan.submodel])
    inside = {n for n in state.tensors if n.startswith("exits.")}
    assert {n.replace("exits.1.0.", "head.") for n in inside} == {
        name for name in state.tensors if name.startswith("head.")
    }
    weight = state.tensors["exits.1.0.linear.weight"]
    assert weight.shape == (3, 8)
    assert not torch.equal(weight, state.tensors["head.linear.weight"])
    update = train(make_runner(method), state, plan)
    assert inside <= update.tensors.keys()
    exits = method.submodels.module(plan.submodel).exits
    assert all(isinstance(part, nn.Sequential) for part in exits.values())  # type: ignore[union-attr, operator]


def test_idle_heads_do_not_keep_the_deployed_one_from_being_trained() -> None:
    # Blocks that grow, so that the last is the costliest.
    task = make_task("cnn", {"layers": [2, 4, 8, 32]})
    plain = MFeDepth(task)
    last = len(plain.submodels.parts.blocks) - 1
    alone = in_order([plain.scheduler.run(None, last, last + 1, ())])
    room = plain.scheduler.peak(alone)
    for memory, blocks in ((room, "blocks 3"), (room - 1, "blocks 1-2")):
        method = MFeDepth(replace(task, budgets=(memory,)))
        assert method.plan(method.setup(), Device(0, "some", memory), 0).submodel.label == blocks
