from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from sizewise.data.augment import Transform
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.local import LocalEngine
from sizewise.engines.site import Site
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.fleet import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.slt import SLT
from sizewise.plan import Update
from sizewise.recipe import Recipe
from sizewise.state import State
from sizewise.task import ModelConfig, Task
from sizewise.training import Shard
from sizewise.view import cut, size_in_bytes

SHIPPED = {
    0.125: "1 1 1 1 3 4 5 12 12 17 17 25 25 44 51 64",
    0.25: "11 12 12 16 16 22 22 32 32 44 51 64",
    0.5: "30 32 35 40 43 53 60 64",
}
"""Channels of 64 in the heads of the public code's tables for ResNet-20 (METHODS 8.2)."""

ENDS = [75, 116, 137, 225, 245, 398, 423, 779, 843, 1384, 1754, 2500]


def tiny(budgets: Sequence[int | None] = (None,), rounds: int = 8, **options: object) -> SLT:
    recipe = Recipe(lr=0.05, batch=32)
    task = Task(ModelConfig("resnet8"), recipe, (1, 8, 8), 3, 0, rounds, tuple(budgets))
    return SLT(task, SLT.Options(**options))  # type: ignore[arg-type]


@cache
def published(ratio: float) -> SLT:
    task = Task(ModelConfig("resnet20"), Recipe(), (3, 32, 32), 10, rounds=2500, ratios=(ratio,))
    return SLT(task, SLT.Options(assign="ratio"))


@pytest.fixture(scope="module")
def budget() -> int:
    """A little more than every step needs with the narrowest head."""
    method = tiny()
    steps = range(1, len(method.channels.groups) + 1)
    return int(1.2 * max(method.cost(step, step - 1, 1 / 64) for step in steps))


@pytest.fixture(scope="module")
def shard() -> Shard:
    images = torch.randint(0, 256, (96, 1, 8, 8), dtype=torch.uint8)
    return Shard(images, torch.arange(96) % 3, torch.arange(96), Transform("none", (0.5,), (0.2,)))


def train(method: SLT, state: State, round_index: int, device: Device, shard: Shard) -> Update:
    plan = method.plan(state, device, round_index)
    return method.train(plan, cut(state.tensors, method.view(plan.piece)), shard, {})


@pytest.mark.parametrize("ratio", SHIPPED)
def test_15_tables_have_the_published_steps(ratio: float) -> None:
    widths = published(ratio).table
    shipped = [int(channels) / 64 for channels in SHIPPED[ratio].split()]
    assert len(widths) == len(shipped) + 1
    assert widths[0] <= widths[1]
    assert widths == sorted(widths)
    assert widths[-1] == 1
    assert widths[1:] == pytest.approx(shipped, abs=0.08)


def test_16_configurations_fit_the_papers_accounting() -> None:
    method = published(0.25)
    (limit,) = method._capacities()
    assert limit is not None
    for step, width in enumerate(method.table):
        assert method.cost(step, max(step - 1, 0), width) <= limit


def test_switch_points_grow_with_the_parameters_that_are_added() -> None:
    method = SLT(published(0.25).task, SLT.Options(assign="ratio"))
    # With the public code's widths they are METHODS 8.3's.
    method.table = [0.185, *(int(channels) / 64 for channels in SHIPPED[0.25].split())]
    ends = method.ends()
    assert ends == sorted(ends)
    assert ends[1:] == pytest.approx(ENDS, rel=0.06)


@pytest.mark.parametrize("rule", ["params_added", "params_trainable", "equal"])
def test_every_rule_ends_with_the_run(rule: str, budget: int) -> None:
    task = replace(tiny([budget]).task, rounds=40)
    method = SLT(task, SLT.Options(rounds=rule))  # type: ignore[arg-type]
    ends = method.ends()
    assert len(ends) == len(method.table)
    assert ends == sorted(ends)
    assert ends[-1] == 40
    state = method.setup()
    steps = [method.step(state, round_index) for round_index in range(40)]
    assert steps == sorted(steps)
    assert steps[-1] == len(method.table) - 1


def test_07_an_unlimited_fleet_is_fedavg(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    def run(method: FedAvg | SLT) -> State:
        site = Site(method, dataset, partition)
        engine, state = LocalEngine(site), method.setup()
        for r in range(2):
            plans = [method.plan(state, Device(device, "any"), r) for device in range(3)]
            state = method.merge(state, engine.train(state, plans))  # type: ignore[arg-type]
        return state

    ours, plain = run(SLT(make_task("cnn"))), run(FedAvg(make_task("cnn")))
    for name, tensor in plain.tensors.items():
        assert torch.equal(ours.tensors[name], tensor)


def test_predicted_is_metered_within_the_budget_in_every_step(budget: int, shard: Shard) -> None:
    method = tiny([budget, 2 * budget], rounds=30)
    state = method.setup()
    uploads = []
    for round_index in sorted({0, *(end for end in method.ends()[:-1])}):
        for memory in (budget, 2 * budget):
            update = train(method, state, round_index, Device(0, "a", memory), shard)
            assert update.peak_bytes == update.plan.predicted
            assert update.peak_bytes <= memory
        weak = train(method, state, round_index, Device(0, "a", budget), shard)
        whole = size_in_bytes(cut(state.tensors, method.view(weak.plan.piece)))
        uploads.append(size_in_bytes(weak.tensors) / whole)
    # The share that is sent falls as layers freeze.
    assert uploads == sorted(uploads, reverse=True)
    assert uploads[-1] < 0.9


def test_11_frozen_layers_do_not_move_and_are_not_sent(budget: int, shard: Shard) -> None:
    method = tiny([budget], rounds=30)
    state = method.setup()
    last = len(method.table) - 1
    update = train(method, state, 29, Device(0, "a", budget), shard)
    frozen = last - 1
    names = [n for n, _ in method._parameters if (method.channels.layer(n) or 0) < frozen]
    names = [n for n in names if method.channels.layer(n) is not None]
    assert names
    assert not set(names) & set(update.tensors)
    merged = method.merge(state, [update])
    for name in names:
        assert torch.equal(merged.tensors[name], state.tensors[name])


def test_strong_devices_freeze_less_and_keep_the_heads_width(budget: int) -> None:
    method = tiny([budget, None], rounds=30)
    state = method.setup()
    weak = method.plan(state, Device(0, "a", budget), 29)
    strong = method.plan(state, Device(1, "b", None), 29)
    assert strong.piece == weak.piece
    assert strong.stages[0].name == "0 frozen"
    assert weak.stages[0].name != "0 frozen"


def test_deploys_the_current_configuration_and_the_full_model(budget: int, shard: Shard) -> None:
    method = tiny([budget], rounds=30)
    state = method.setup()
    assert list(method.deploy(state)) == ["full", method.piece(0, method.table[0]).size]
    state = method.merge(state, [train(method, state, 29, Device(0, "a", budget), shard)])
    assert state.extras["trained"] == len(method.table) - 1
    assert list(method.deploy(state)) == ["full"]


def test_early_stop_goes_on_when_the_loss_stands_still(budget: int) -> None:
    method = tiny([budget], patience=2, rounds=30)
    method = SLT(method.task, SLT.Options(rounds="early_stop", patience=2))
    state = method.setup()
    seen = []
    for loss in (2.0, 1.5, 1.6, 1.4, 1.5, 1.5, 3.0, 2.0):
        state = replace(state, extras={**state.extras, **method._judged(state, loss)})
        seen.append(state.extras["step"])
    assert seen == [0, 0, 0, 0, 0, 1, 1, 1]


def test_more_depth_needs_a_narrower_head(budget: int) -> None:
    one, two = tiny([budget]), tiny([budget], depth=2)
    assert sum(two.table[:4]) < sum(one.table[:4])


def test_budget_that_holds_no_layer_is_named() -> None:
    with pytest.raises(BudgetTooSmall, match="head of one channel needs"):
        tiny([20_000]).setup()


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"method\.depth must be at least 1"):
        SLT.Options(depth=0)
