"""DepthFL: its loss and FedDyn by hand, depths that fit bytes, and what overlaps."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor
from torch.nn import functional as F

from depth_cases import VIT, make_runner, make_task, train
from sizewise import cli
from sizewise import config as configs
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Plan, Refusal, Update
from sizewise.exchange.state import State, sha256
from sizewise.exchange.view import Tensors
from sizewise.families import feddyn
from sizewise.families.prefixwise import Depths
from sizewise.fleet.devices import Device
from sizewise.methods import find
from sizewise.methods.depthfl import DepthFL, joint, ramp_up
from sizewise.methods.fedavg import FedAvg
from sizewise.runs import session
from sizewise.runs.folder import RunFolder, Totals
from sizewise.steps.step import backpropagate
from sizewise.training.evaluation import total
from sizewise.training.loop import Shard
from sizewise.training.task import Task

MLP = {"hidden": [16, 12, 10, 8]}
"""Three depths, like the residual network of `depth_cases`, but predicted in no time."""


def make(task: Task | None = None, **options: Any) -> DepthFL:
    return DepthFL(task or make_task(norm="tracked"), DepthFL.Options(**options))


def make_mlp(options: Any = None, **recipe: Any) -> DepthFL:
    return make(make_task("mlp", MLP, **recipe), **(options or {}))


def peak(method: DepthFL, depth: int) -> int:
    return method.peak(method.trainee(depth))


def plan_of(method: DepthFL, depth: int, device: int = 0, round_index: int = 0) -> Plan:
    stage = method.task.stage(round_index)
    return Plan(device, round_index, "some", method.trainee(depth), (stage,))


def by_server_name(method: DepthFL, update: Update) -> dict[str, Tensor]:
    view = method.submodels.view(update.plan.submodel)
    return {view[name].name: tensor for name, tensor in update.tensors.items()}


# ---- the loss


class Given:
    """Stands in for a model whose exits have these logits."""

    def __init__(self, *logits: Tensor) -> None:
        self.given = [tensor.requires_grad_() for tensor in logits]

    def logits(self, x: Tensor) -> list[Tensor]:
        return self.given


def test_two_exits_by_hand() -> None:
    # softmax(0, 0) = (1/2, 1/2); softmax(0, ln 3) = (1/4, 3/4); the label is class 1.
    model: Any = Given(torch.zeros(1, 2), torch.tensor([[0.0, math.log(3)]]))
    labels = torch.tensor([1])
    entropies = math.log(2) + math.log(4 / 3)
    to_second = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # KL((1/2, 1/2) || (1/4, 3/4))
    to_first = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    for weight in (0.0, 0.25, 1.0):
        loss = joint(model, torch.empty(1), labels, weight).item()
        assert loss == pytest.approx(entropies + weight * (to_first + to_second))


def test_three_exits_share_the_weight_of_their_teachers() -> None:
    logits = [torch.randn(4, 3) for _ in range(3)]
    labels = torch.tensor([0, 1, 2, 1])
    expected = sum(float(F.cross_entropy(z, labels)) for z in logits)
    p = [z.softmax(1) for z in logits]
    for i in range(3):
        for j in range(3):
            terms = p[j] * (p[j].log() - p[i].log())
            expected += 0.7 / 2 * float(terms.sum(1).mean())  # It is 0 where i = j.
    model: Any = Given(*logits)
    assert joint(model, torch.empty(4), labels, 0.7).item() == pytest.approx(expected, rel=1e-5)


def test_teachers_are_detached() -> None:
    # An exit learns from p_i - y and from p_i - p_j, but not from what it does to the others.
    model: Any = Given(torch.tensor([[0.0, 0.0]]), torch.tensor([[4.0, -4.0]]))
    backpropagate(joint(model, torch.empty(1), torch.tensor([0]), 0.5))
    first, second = (z.detach().softmax(1) for z in model.given)
    target = torch.tensor([[1.0, 0.0]])
    torch.testing.assert_close(model.given[0].grad, first - target + 0.5 * (first - second))
    torch.testing.assert_close(model.given[1].grad, second - target + 0.5 * (second - first))


def test_the_weight_ramps_up_from_0_0067_to_1() -> None:
    assert ramp_up(0, 300) == pytest.approx(0.0067, abs=5e-5)
    assert ramp_up(150, 300) == pytest.approx(math.exp(-1.25))
    assert ramp_up(299, 300) < ramp_up(300, 300) == ramp_up(1000, 300) == 1
    method = make()
    assert weight_in(method, 0) == pytest.approx(math.exp(-5))
    assert weight_in(method, 300) == 1
    # It does not change what a step needs: rounds share a predicted peak and a metered one.
    early, late = (plan_of(method, 3, round_index=number).stages[0] for number in (0, 300))
    assert (early.trainable, early.work) == (late.trainable, late.work)
    assert weight_in(make(ramp=2), 1) == pytest.approx(math.exp(-1.25))
    assert weight_in(make(distil=False), 9) == 0


def weight_in(method: DepthFL, round_index: int) -> float:
    """Return how much the exits of a device learn from each other in a round."""
    state, seen, fit = method.setup(), [], method.trainer.fit

    def spy(plan: Plan, tensors: Tensors, shard: Shard, loss: Any, **named: Any) -> Update:
        seen.extend(loss(stage) for stage in plan.stages)
        return fit(plan, tensors, shard, loss, **named)

    method.trainer.fit = spy  # type: ignore[method-assign]
    train(make_runner(method), state, plan_of(method, 3, round_index=round_index))
    method.trainer.fit = fit  # type: ignore[method-assign]
    (used,) = seen
    assert used.func is joint
    weight: float = used.keywords["weight"]
    return weight


def test_a_device_minimises_it() -> None:
    method = make(make_task(batch=32, norm="tracked", weight_decay=0.0), feddyn=False, ramp=1)
    state, runner = method.setup(), make_runner(method)
    update = train(runner, state, plan_of(method, 3, round_index=1))
    module: Any = method.submodels.filled(method.main, state)
    rows = runner.partition.shard(0)
    images = runner.transform(runner.dataset.train_inputs[rows], None)
    loss: Any = joint(module.train(), images, runner.dataset.train_labels[rows], 1.0)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for (name, old), gradient in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(
            update.tensors[name], old.detach() - 0.05 * gradient, rtol=1e-4, atol=1e-6
        )


# ---- depths


def test_depths_are_prefixes_that_share_their_names() -> None:
    method = make()
    assert method.stops == (2, 3, 4)
    views = [
        {place.name for place in method.submodels.view(method.trainee(depth)).values()}
        for depth in (1, 2, 3)
    ]
    assert views[0] < views[1] < views[2] == method.setup().tensors.keys()
    parts = [{name.rpartition(".")[0].split(".conv")[0] for name in view} for view in views]
    assert {"stem", "blocks.0", "blocks.1", "exits.2.linear"} <= parts[0]
    assert not any(name.startswith(("blocks.2", "exits.3", "head")) for name in views[0])
    assert not any(name.startswith(("blocks.3", "head")) for name in views[1])
    assert {"exits.3.linear", "blocks.3", "head.linear"} <= parts[2]


@pytest.mark.parametrize(
    ("exits", "stops"), [((1,), (1, 4)), ((3, 1, 4), (1, 3, 4)), ((0, 2), (0, 2, 4))]
)
def test_exits_can_be_named(exits: tuple[int, ...], stops: tuple[int, ...]) -> None:
    method = make(exits=exits)
    assert method.stops == stops
    state = method.setup()
    assert train(make_runner(method), state, plan_of(method, len(stops))).steps == 2


@pytest.mark.parametrize(
    ("options", "optimizer"), [({}, "sgd"), ({"extended": False}, "adam")], ids=str
)
def test_bytes_decide_the_depth_and_hold(options: dict[str, Any], optimizer: str) -> None:
    task = make_task(batch=6, max_steps=2, norm="tracked", optimizer=optimizer, lr=0.001)
    method = make(replace(task, enforce=True), **options)
    state, runner = method.setup(), make_runner(method)
    needs = [peak(method, depth) for depth in (1, 2, 3)]
    for depth, need in enumerate(needs, start=1):
        plan = method.plan(state, Device(0, "some", need), 0)
        assert plan.submodel == method.trainee(depth)
        assert plan.submodel.label == method.trainee(depth).label
        assert plan.predicted == plan.budget == need
        assert train(runner, state, plan).peak_bytes == need
        short = runner.train(state, replace(plan, budget=need - 1))
        assert isinstance(short, Refusal)
        assert "out of budget" in short.reason
        if need > min(needs):
            less = method.plan(state, Device(0, "some", need - 1), 0)
            assert less.predicted is not None
            assert less.predicted < need
    with pytest.raises(BudgetTooSmall, match=f"needs {min(needs):,} bytes"):
        method.plan(state, Device(0, "some", min(needs) - 1), 0)
    assert method.plan(state, Device(0, "any"), 0).submodel == method.trainee(3)


@pytest.mark.parametrize(
    ("model", "args", "options"), [("vit", VIT, {"distil": False}), ("mlp", MLP, {"feddyn": False})]
)
def test_bytes_hold_for_other_models(
    model: str, args: dict[str, Any], options: dict[str, Any]
) -> None:
    method = make(make_task(model, args, batch=6, epochs=2, max_steps=2), **options)
    state, runner = method.setup(), make_runner(method)
    for depth in range(1, len(method.stops) + 1):
        plan = replace(plan_of(method, depth), budget=peak(method, depth))
        assert train(runner, state, plan).peak_bytes == plan.budget


@pytest.mark.parametrize(
    ("ratio", "depth"), [(0.1, 1), (0.33, 1), (1 / 3, 1), (2 / 3, 2), (0.99, 2), (1, 3), (2, 3)]
)
def test_ratios_decide_the_depth_as_in_the_paper(ratio: float, depth: int) -> None:
    method = make_mlp({"assign": "ratio"})
    assert method.options.ignores_budgets
    plan = method.plan(method.setup(), Device(0, "some", 1, ratio=ratio), 0)
    assert plan.submodel == method.trainee(depth)
    assert plan.submodel.label == f"depth {depth}"
    assert plan.budget is None


def test_quarters_of_the_paper_have_depths_1_to_4() -> None:
    method = make(
        make_task("vit", {**VIT, "depth": 4}, ratios=(0.25, 0.5, 0.75, 1)), assign="ratio"
    )
    assert [method.depth(Device(0, "q", ratio=ratio)) for ratio in method.task.ratios] == [
        1,
        2,
        3,
        4,
    ]
    assert method.setup().facts(Depths).depths == (1, 2, 3, 4)
    with pytest.raises(ConfigError, match="needs a fleet that is given by ratios"):
        method.plan(method.setup(), Device(0, "some", 10**6), 0)


# ---- the server


@pytest.mark.parametrize(("weighting", "weights"), [("equal", (1, 1)), ("samples", (12, 9))])
def test_devices_of_different_depth_meet_in_the_mean(
    weighting: str, weights: tuple[int, int]
) -> None:
    method = make(make_task(norm="tracked", weighting=weighting), feddyn=False)
    state, runner = method.setup(), make_runner(method)
    updates = [train(runner, state, plan_of(method, depth, depth - 1)) for depth in (1, 2)]
    shallow, deep = (by_server_name(method, update) for update in updates)
    merged = method.merge(state, updates)
    for name, tensor in merged.tensors.items():
        if not tensor.is_floating_point():
            assert int(tensor) == max(int(sent.get(name, 0)) for sent in (shallow, deep))
        elif name in shallow:
            mean = (weights[0] * shallow[name] + weights[1] * deep[name]) / sum(weights)
            torch.testing.assert_close(tensor, mean)
        elif name in deep:
            torch.testing.assert_close(tensor, deep[name])
        else:
            assert torch.equal(tensor, state.tensors[name]), name
    untouched = merged.tensors.keys() - deep.keys()
    assert {"blocks.3.conv1.weight", "head.linear.weight"} <= untouched


def literal_feddyn(
    method: DepthFL, runner: DeviceRunner, rounds: Sequence[Sequence[int]], devices: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Run FedDyn as its formulas have it, linear term and all; one full batch a step.

    Args:
        method: Says what submodels there are.
        runner: The data.
        rounds: The depth of each device that takes part, from device 0 on, for each round.
        devices: K.

    Returns:
        The server's tensors, its h, and each device's g by the server's names.
    """
    alpha, recipe = method.options.alpha, method.task.recipe
    theta = {name: tensor.clone() for name, tensor in method.setup().tensors.items()}
    h = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    memory: dict[int, dict[str, Tensor]] = {}
    for number, depths in enumerate(rounds):
        sent: dict[str, list[Tensor]] = {}
        for device, depth in enumerate(depths):
            submodel = method.trainee(depth)
            view = method.submodels.view(submodel)
            module: Any = method.submodels.build(submodel).train()
            module.load_state_dict({name: theta[place.name] for name, place in view.items()})
            own = {view[name].name: p for name, p in module.named_parameters()}
            g = memory.setdefault(device, {})
            for name, parameter in own.items():
                g.setdefault(name, torch.zeros_like(parameter.detach()))
            rows = runner.partition.shard(device)
            images = runner.transform(runner.dataset.train_inputs[rows], None)
            labels = runner.dataset.train_labels[rows]
            for _ in range(recipe.epochs):
                loss: Any = joint(module, images, labels, ramp_up(number, method.options.ramp))
                for name, p in own.items():
                    loss = loss - (p * g[name]).sum()
                    loss = loss + alpha / 2 * (p - theta[name]).square().sum()
                module.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for p in own.values():
                        p -= recipe.lr * p.grad
            for name, p in own.items():
                g[name] = g[name] - alpha * (p.detach() - theta[name])
            for name, tensor in module.state_dict().items():
                sent.setdefault(view[name].name, []).append(tensor.detach().clone())
        for name, tensors in sent.items():
            if not theta[name].is_floating_point():
                theta[name] = torch.stack(tensors).max()
                continue
            mean = torch.stack(tensors).mean(0)
            if "running" in name:
                theta[name] = mean
                continue
            h[name] = h[name] - alpha * len(tensors) * (mean - theta[name]) / devices
            theta[name] = mean - h[name] / alpha
    return theta, h, memory


@pytest.mark.parametrize(("model", "args"), [("depth_cases:narrow", {}), ("vit", VIT)])
def test_feddyn_is_the_literal_formula(model: str, args: dict[str, Any]) -> None:
    task = make_task(
        *(model, args),
        **{"batch": 32, "epochs": 3, "momentum": 0.0, "weight_decay": 0.0},
        **{"norm": "tracked", "weighting": "equal"},
    )
    method = make(replace(task, devices=5), alpha=0.3, ramp=2)
    runner, state = make_runner(method), method.setup()
    rounds = [(1, 3), (2, 2), (1, 1)]
    for number, depths in enumerate(rounds):
        plans = [plan_of(method, depth, k, number) for k, depth in enumerate(depths)]
        updates = [train(runner, state, plan) for plan in plans]
        before = state
        state = method.merge(before, updates)
        known = {**before.devices, **{k: update.device_state for k, update in enumerate(updates)}}
        state = replace(state, devices=known)
    theta, h, memory = literal_feddyn(method, runner, rounds, devices=5)
    view = method.submodels.view(method.main)
    close = {"rtol": 2e-3, "atol": 2e-5}
    assert state.tensors.keys() == theta.keys()
    for name, tensor in theta.items():
        torch.testing.assert_close(state.tensors[name], tensor, **close, msg=name)
    parameters = set(method.submodels.parameters(state, method.main))
    assert state.server_state.keys() == {f"feddyn/{name}" for name in parameters}
    for name in parameters:
        torch.testing.assert_close(state.server_state[f"feddyn/{name}"], h[name], **close, msg=name)
    for device, g in memory.items():
        found = {view[name].name: tensor for name, tensor in state.devices[device].items()}
        assert found.keys() == g.keys() == g.keys() & parameters
        for name, tensor in g.items():
            torch.testing.assert_close(found[name], tensor, **close, msg=name)
    # In the last round nobody trained the deepest blocks.
    deepest = view.keys() - method.submodels.view(method.trainee(2)).keys()
    for name in {view[local].name for local in deepest}:
        assert torch.equal(state.tensors[name], before.tensors[name])
        if name in parameters:
            assert torch.equal(
                state.server_state[f"feddyn/{name}"], before.server_state[f"feddyn/{name}"]
            )


def test_feddyn_on_numbers() -> None:
    # a = 1/2; two of K = 4 devices go from 1 to 2 and to 4.
    received, alpha = {"w": torch.tensor([1.0])}, 0.5
    first = feddyn.remembered({}, received, {"w": torch.tensor([2.0])}, alpha)
    second = feddyn.remembered({}, received, {"w": torch.tensor([4.0])}, alpha)
    assert (float(first["w"]), float(second["w"])) == (-0.5, -1.5)
    mean = {"w": torch.tensor([3.0]), "count": torch.tensor(7)}
    old = {**received, "count": torch.tensor(5)}
    tensors, memory = feddyn.correct(old, mean, {}, {"w": 2 / 4}, alpha)
    assert float(memory["feddyn/w"]) == -0.5 * 0.5 * 2
    assert float(tensors["w"]) == 3 + 0.5 / 0.5
    assert tensors["count"] == 7
    anchor = feddyn.anchor({"w": tensors["w"], "b": torch.ones(1)}, first, alpha)
    assert (float(anchor["w"]), float(anchor["b"])) == (4 - 0.5 / 0.5, 1)
    # One device goes on to 6, where its own loss is at its minimum.
    last = feddyn.remembered(first, {"w": tensors["w"]}, {"w": torch.tensor([6.0])}, alpha)
    assert float(last["w"]) == -0.5 - 0.5 * 2
    again, moved = feddyn.correct(tensors, {"w": torch.tensor([6.0])}, memory, {"w": 1 / 4}, alpha)
    assert float(moved["feddyn/w"]) == -0.5 - 0.5 * 2 / 4
    assert float(again["w"]) == 6 + 0.75 / 0.5


def test_a_round_without_updates_changes_nothing() -> None:
    method = make_mlp()
    state, runner = method.setup(), make_runner(method)
    state = method.merge(state, [train(runner, state, plan_of(method, 1))])
    after = method.merge(state, [])
    assert sha256(after.tensors) == sha256(state.tensors)
    assert sha256(after.server_state) == sha256(state.server_state) != sha256({})


# ---- what it becomes without its parts


def rounds_of(method: Any) -> State:
    runner, state = make_runner(method), method.setup()
    for number in range(2):
        plans = [method.plan(state, Device(device, "any"), number) for device in range(3)]
        state = method.merge(state, [train(runner, state, plan) for plan in plans])
    return state


@pytest.mark.parametrize("options", [{}, {"distil": False, "extended": False}], ids=str)
def test_with_one_exit_and_without_feddyn_it_is_fedavg_bit_for_bit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sizewise.families.prefixwise.stage_ends", lambda shapes: [])
    task = make_task(epochs=2, norm="tracked", clip=1.0, augment="crop-flip", proximal=0.1)
    method = make(task, feddyn=False, **options)
    found, expected = rounds_of(method).tensors, rounds_of(FedAvg(task)).tensors
    assert method.stops == (4,)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_all_devices_with_their_deepest_exit_only_are_fedavg_bit_for_bit() -> None:
    task = make_task(epochs=2, norm="tracked")
    method = make(task, feddyn=False, distil=False, extended=False)
    found, expected = rounds_of(method).tensors, rounds_of(FedAvg(task)).tensors
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    start, early = method.setup().tensors, found.keys() - expected.keys()
    assert early
    assert all(torch.equal(found[name], start[name]) for name in early)


def test_a_device_that_is_not_extended_has_its_deepest_exit_only() -> None:
    method = make(extended=False)
    names = {place.name for place in method.submodels.view(method.trainee(2)).values()}
    assert {n.split(".")[1] for n in names if n.startswith("exits.")} == {"3"}
    sizes = method.sizes(State({}).noting(Depths((1, 3))))
    assert sizes == [method.single(1), method.single(3)]
    assert [size.label for size in sizes] == ["exit 1", "exit 3"]


# ---- what is deployed


def test_exits_and_depths_are_deployed_up_to_the_deepest_that_trains() -> None:
    task = make_task("mlp", MLP)
    method = make(replace(task, budgets=(100, peak(make(task), 1), peak(make(task), 2))))
    state = method.setup()
    assert state.facts(Depths).depths == (1, 2)
    models = method.deploy(state)
    assert list(models) == ["exit 1", "exit 2", "depth 1", "depth 2"]
    accuracies = {"exit 1": 0.1, "exit 2": 0.2, "depth 1": 0.3, "depth 2": 0.4}
    assert method.summary_metric(accuracies) == 0.4
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        logits = {size: model.fill().eval()(x).clone() for size, model in models.items()}
    assert torch.equal(logits["depth 1"], logits["exit 1"])
    torch.testing.assert_close(logits["depth 2"], (logits["exit 1"] + logits["exit 2"]) / 2)
    assert total(make_runner(method).evaluate(state, "depth 2", None)).samples == 12


# ---- what is refused


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ({"server": "fedadam"}, {}, "FedDyn takes the server's step"),
        ({"server_lr": 0.5}, {}, "FedDyn takes the server's step"),
        ({"norm": "per_submodel"}, {}, "use 'batch', 'sbn' or 'tracked'"),
        ({"eval_memory": 10**6}, {}, "which recipe.eval_memory cannot; leave it out"),
        ({}, {"alpha": 0.0}, "method.alpha must be positive, not 0.0"),
        ({}, {"ramp": 0}, "method.ramp must be at least 1 round, not 0"),
        ({}, {"exits": (5,)}, "method.exits must be after 0 to 4 blocks, not 5"),
        ({}, {"exits": (-1,)}, "method.exits must be after 0 to 4 blocks, not -1"),
    ],
)
def test_what_cannot_be_combined(
    recipe: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(make_task(**recipe), **options).setup()


@pytest.mark.parametrize("recipe", [{"proximal": 0.1}, {"server": "fedadam", "server_lr": 0.01}])
def test_without_feddyn_they_can(recipe: dict[str, Any]) -> None:
    method = make_mlp({"feddyn": False}, **recipe)
    assert method.task.recipe.proximal == recipe.get("proximal", 0)
    state, runner = method.setup(), make_runner(method)
    merged = method.merge(state, [train(runner, state, plan_of(method, 1))])
    assert not torch.equal(merged.tensors["exits.1.weight"], state.tensors["exits.1.weight"])
    assert ("first/exits.1.weight" in merged.server_state) == ("server" in recipe)


# ---- whole runs


def tables() -> dict[str, Any]:
    method = make(replace(make_task("mlp", MLP, momentum=0.0), classes=10))
    budgets = [peak(method, depth) for depth in (1, 2, 3)]
    return {
        "rounds": 3,
        "model": {"name": "mlp", "args": MLP},
        "data": {"train_limit": 64, "test_limit": 20},
        "fleet": {
            "per_round": 4,
            "group": [{"count": 2, "memory": memory + 1} for memory in budgets],
            "event": [
                {"round": 2, "upgrade": f"{(budgets[0] + 1) / 1000:.12g}kB", "memory": "1MB"}
            ],
        },
        "method": {"name": "depthfl"},
        "recipe": {"batch": 8, "lr": 0.05, "max_steps": 2, "eval_batch": 20, "momentum": 0.0},
        "engine": {"enforce": True},
    }


def test_the_command_line_trains_depths_within_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(tomli_w.dumps(tables()))
    run = tmp_path / "run"
    command = ["sizewise", "run", f"{tmp_path / 'config.toml'}", "--out", f"{run}", "--json"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    assert not result["refused"]
    sizes = [f"{kind} {number}" for kind in ("exit", "depth") for number in (1, 2, 3)]
    assert list(result["sizes"]) == sizes
    assert result["accuracy"] == result["sizes"]["depth 3"]
    updates = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    assert {line["size"] for line in updates} == {"depth 1", "depth 2", "depth 3"}
    by_size = {line["size"]: line for line in updates}
    assert by_size["depth 1"]["bytes_up"] < by_size["depth 2"]["bytes_up"]
    assert by_size["depth 2"]["bytes_up"] < by_size["depth 3"]["bytes_up"]
    for line in updates:
        assert line["peak_bytes"] == line["predicted"] <= line["budget"]
        assert line["bytes_down"] == line["bytes_up"]
    written = configs.load(run / "config.toml")
    assert (written.recipe.norm, written.recipe.weighting) == ("tracked", "equal")
    assert written.recipe.proximal == 0, "the config is what the user wrote"


def test_a_resumed_run_goes_on_with_what_devices_and_server_remember(tmp_path: Path) -> None:
    config = configs.from_dict(tables())
    with session.started(config, tmp_path / "whole") as federation:
        expected = federation.run()
    with session.started(config, tmp_path / "run") as federation:
        state, _, _ = federation.round(federation.method.setup(), Totals(), 0)
    assert state.server_state
    assert state.devices
    with session.resumed(tmp_path / "run") as federation:
        assert federation.run()["state_sha256"] == expected["state_sha256"]
    ends = [RunFolder(tmp_path / name).restore() for name in ("whole", "run")]
    (whole, _), (resumed, _) = (end or pytest.fail("no checkpoint") for end in ends)
    assert sha256(whole.server_state) == sha256(resumed.server_state)
    for number, memory in whole.devices.items():
        assert sha256(memory) == sha256(resumed.devices[number])


def test_it_is_found_by_name() -> None:
    assert find("depthfl") is DepthFL
    assert DepthFL.discloses == {"weights"}


def test_a_proximal_term_of_the_recipe_adds_to_that_of_feddyn() -> None:
    """a/2 |v - (w + g/a)|^2 + mu/2 |v - w|^2 is (a + mu)/2 |v - (w + g/(a + mu))|^2 + constant."""
    method = make(make_task(proximal=0.3), alpha=0.1)
    assert method.task.recipe.proximal == pytest.approx(0.4)
    w, g, v = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([5.0], requires_grad=True)
    literal = -(v * g).sum() + 0.05 * (v - w).square().sum() + 0.15 * (v - w).square().sum()
    pulled = 0.2 * (v - feddyn.anchor({"w": w}, {"w": g}, 0.4)["w"]).square().sum()
    for term in (literal, pulled):
        assert torch.autograd.grad(term, v)[0] == pytest.approx(-0.4)
