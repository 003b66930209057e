"""Which blocks a device trains together, by its bytes or by the paper's accounting."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from depth_cases import NARROW, RENAMED, VIT, make_task, start, whole_peak
from sizewise.errors import BudgetTooSmall, ConfigError, ModelError
from sizewise.exchange.plan import TrainingStage
from sizewise.exchange.state import State
from sizewise.fleet.devices import Device
from sizewise.methods.fedepth import FeDepth
from sizewise.methods.fedepth.blocks import Blocks, Run, TakenApart
from sizewise.methods.fedepth.schedule import Schedule


@cache
def method(model: str = NARROW, norm: str = "batch", **options: Any) -> FeDepth:
    """Return a method that keeps the predictions of all tests that ask it."""
    args = VIT if model == "vit" else {}
    return FeDepth(make_task(model, args, norm=norm), FeDepth.Options(**options))


def run_of(stage: TrainingStage) -> Run:
    assert isinstance(stage.work, Run)
    return stage.work


def blocks_of(schedule: Schedule) -> list[Blocks]:
    found = [run_of(stage).blocks for stage in schedule.stages]
    assert None not in found
    return found  # type: ignore[return-value]


def peers_of(schedule: Schedule) -> list[tuple[Blocks, ...]]:
    return [run_of(stage).peers for stage in schedule.stages]


def whole_stage(fedepth: FeDepth) -> TrainingStage:
    """Return the stage of a device that trains the model as it is."""
    return replace(fedepth.task.stage(0), work=Run())


def runs_of(schedule: Schedule) -> list[list[int]]:
    """Return the blocks of each stage, counted from 1 as in the paper."""
    return [[number + 1 for number in blocks.learn] for blocks in blocks_of(schedule)]


# ---- in bytes


@given(st.integers(50_000, 160_000))
@example(60_039)  # One byte less than the cheapest block needs.
@example(60_040)
@settings(max_examples=60)
def test_runs_fit_the_budget_and_are_as_long_as_they_can_be(budget: int) -> None:
    fedepth = method()
    cost = {
        (i, j): fedepth.scheduler.peak(fedepth.scheduler.run(None, i, j, ()))
        for i in range(4)
        for j in range(i + 1, 5)
    }
    alone = [cost[i, i + 1] for i in range(4)]
    if min(alone) > budget:
        with pytest.raises(BudgetTooSmall) as error:
            fedepth.scheduler.schedule(budget)
        assert (error.value.budget, error.value.needed) == (budget, min(alone))
        return
    schedule = fedepth.scheduler.schedule(budget)
    for stage in schedule.stages:
        assert fedepth.peak(schedule.submodel, stage) <= budget
    if whole_peak(fedepth) <= budget:
        assert schedule.submodel == fedepth.main
        assert schedule.submodel.label == "full"
        assert schedule.stages == (whole_stage(fedepth),)
        return
    trained = []
    for blocks in blocks_of(schedule):
        begin, stop = blocks.learn[0], blocks.stop
        assert blocks.learn == tuple(range(begin, stop))
        assert blocks.frozen == tuple(range(begin))
        assert blocks.stem == (begin == 0)
        assert stop == 4 or cost[begin, stop + 1] > budget
        trained += blocks.learn
    assert trained == [number for number in range(4) if alone[number] <= budget]


@pytest.mark.parametrize(
    ("share", "runs"),
    [
        (0.4, [[4]]),
        (0.5, [[2], [3], [4]]),
        (0.6, [[1], [2], [3, 4]]),
        (0.7, [[1], [2, 3], [4]]),
        (0.8, [[1, 2], [3, 4]]),
        (0.9, [[1, 2, 3], [4]]),
    ],
)
def test_runs_of_a_small_network(share: float, runs: list[list[int]]) -> None:
    assert runs_of(method().scheduler.schedule(int(share * whole_peak(method())))) == runs


def test_a_plan_has_its_predicted_peak_and_only_what_it_trains_learns() -> None:
    fedepth = method()
    budget = int(0.5 * whole_peak(fedepth))
    plan = fedepth.plan(fedepth.setup(), Device(3, "small", budget), 2)
    assert plan.budget == budget
    peaks = [fedepth.peak(plan.submodel, stage) for stage in plan.stages]
    assert plan.predicted == max(peaks) <= budget
    assert (plan.device, plan.round, plan.group) == (3, 2, "small")
    # Block 1 does not fit, and the gradient of the stem would have to pass it.
    assert [stage.trainable for stage in plan.stages] == [
        (f"model.blocks.{number}", "model.head") for number in (1, 2, 3)
    ]


def test_nothing_fits() -> None:
    with pytest.raises(BudgetTooSmall, match="training the cheapest block needs 60,040 bytes"):
        method().plan(State({}), Device(0, "tiny", 1000), 0)


def test_bypassed_blocks_are_neither_run_nor_counted() -> None:
    fedepth = method(skip="bypass")
    budget = int(0.5 * whole_peak(fedepth))
    schedule = fedepth.scheduler.schedule(budget)
    # The stem learns with the first block that is run; together with block 2 it does not fit.
    assert runs_of(schedule) == [[3], [4]]
    assert [blocks.stem for blocks in blocks_of(schedule)] == [True, False]
    assert [blocks.frozen for blocks in blocks_of(schedule)] == [(), (2,)]
    assert all(fedepth.peak(schedule.submodel, s) <= budget for s in schedule.stages)


def test_bytes_with_and_without_a_block_before_are_not_mixed_up() -> None:
    fedepth = method(skip="bypass")
    through = fedepth.scheduler.peak(fedepth.scheduler.run(None, 3, 4, ()))
    around = fedepth.scheduler.peak(fedepth.scheduler.run(None, 3, 4, (0, 1)))
    assert (through, around) == (60_040, 57_164)


# ---- part of a batch at a time


@pytest.mark.parametrize(("model", "norm", "last"), [(NARROW, "tracked", 3), ("vit", "batch", 2)])
def test_a_prefix_that_needs_too_much_runs_in_parts(model: str, norm: str, last: int) -> None:
    fedepth = method(model, norm)
    peak = fedepth.scheduler.peak(fedepth.scheduler.run(None, last, last + 1, ()))
    (same,) = blocks_of(fedepth.scheduler.run(peak, last, last + 1, ()))
    assert same.micro is None
    smaller = fedepth.scheduler.run(peak - 1, last, last + 1, ())
    (parts,) = blocks_of(smaller)
    assert parts == replace(same, micro=1)
    # Where the blocks that learn need the most, running others in parts does not help.
    assert (fedepth.scheduler.peak(smaller) < peak) == (model == NARROW)
    # The stem learns with the first run, which has nothing before it.
    (first,) = blocks_of(fedepth.scheduler.run(1, 0, 1, ()))
    assert first.micro is None


def test_parts_of_a_batch_let_a_smaller_device_take_part() -> None:
    fedepth = method(NARROW, "tracked")
    alone = fedepth.scheduler.peak(fedepth.scheduler.run(None, 3, 4, ()))
    schedule = fedepth.scheduler.schedule(alone - 1)
    assert runs_of(schedule) == [[4]]
    assert schedule.submodel.label == "blocks 4 (1 at a time before)"
    assert fedepth.scheduler.peak(schedule) < alone


def test_batches_whose_statistics_count_are_never_taken_apart() -> None:
    for norm in ("batch", "sbn"):
        (blocks,) = blocks_of(method(NARROW, norm).scheduler.run(1, 3, 4, ()))
        assert blocks.micro is None


# ---- several models


def test_a_device_with_room_trains_more_models() -> None:
    fedepth = method()
    whole, two = whole_peak(fedepth), fedepth.scheduler.peak(fedepth.scheduler.regular(1))
    assert fedepth.scheduler.schedule(two).submodel.label == "blocks 1-4 + 1-4"
    assert fedepth.scheduler.schedule(10 * two).submodel.label == "blocks 1-4 + 1-4"
    assert fedepth.scheduler.schedule(whole).submodel == fedepth.main
    # Less than two: the second one run by run, if all its blocks fit what the first leaves.
    mixed = fedepth.scheduler.schedule(int(1.7 * whole))
    assert mixed.submodel.label == "blocks 1-4 + 1 | 1-4 + 2-3 | 1-4 + 4"
    assert mixed.submodel == TakenApart(True, exits=(), peers=1)
    assert fedepth.scheduler.peak(mixed) <= 1.7 * whole
    (peer,) = peers_of(mixed)[1]
    assert peer == Blocks((1, 2), (0,), stem=False)
    trainable = mixed.stages[1].trainable or ()
    learning = [name for name in trainable if name.startswith("peers")]
    assert learning == ["peers.0.blocks.1", "peers.0.blocks.2", "peers.0.head"]
    assert fedepth.scheduler.schedule(int(1.4 * whole)).submodel == fedepth.main


@pytest.mark.parametrize(("models", "peers"), [(1, 0), (3, 2)])
def test_most_models_of_a_device(models: int, peers: int) -> None:
    schedule = method(models=models).scheduler.schedule(10**9)
    assert schedule.submodel.peers == peers


def test_no_models_at_all() -> None:
    with pytest.raises(ConfigError, match=r"method\.models must be at least 1, not 0"):
        FeDepth.Options(models=0)


def test_an_unlimited_device_trains_one_model() -> None:
    fedepth = method()
    assert fedepth.scheduler.schedule(None) == Schedule(fedepth.main, (whole_stage(fedepth),))


# ---- by the paper's accounting


@cache
def published(models: int = 2, **options: Any) -> FeDepth:
    task = make_task("preresnet20", image=(3, 32, 32), batch=32)
    return FeDepth(task, FeDepth.Options(assign="ratio", models=models, **options))


TABLE = [  # What the public code has for each share of the whole model's bytes
    (1 / 8, [[4], [5], [6], [7, 8], [9]]),
    (1 / 6, [[1], [2], [3], [4], [5, 6], [7, 8, 9]]),
    (1 / 3, [[1, 2], [3, 4], [5, 6, 7, 8, 9]]),
    (1 / 2, [[1, 2, 3], [4, 5, 6, 7, 8, 9]]),
]


@pytest.mark.parametrize(("ratio", "runs"), TABLE)
def test_decompositions_of_the_paper(ratio: float, runs: list[list[int]]) -> None:
    schedule = published().scheduler.schedule(ratio)
    assert runs_of(schedule) == runs
    for blocks in blocks_of(schedule):
        assert blocks.frozen == tuple(range(blocks.learn[0]))
        assert blocks.micro is None
    assert published().options.ignores_budgets


def test_an_eighth_goes_around_the_first_blocks_in_the_public_code() -> None:
    schedule = published(skip="bypass").scheduler.schedule(1 / 8)
    assert runs_of(schedule) == TABLE[0][1]
    stages = blocks_of(schedule)
    assert [blocks.stem for blocks in stages] == [True] + [False] * 4
    assert [blocks.frozen for blocks in stages] == [(), (3,), (3, 4), (3, 4, 5), (3, 4, 5, 6, 7)]


def test_ratios_from_one_on_are_whole_models() -> None:
    assert published().scheduler.schedule(1.0).submodel == published().main
    assert published().scheduler.schedule(2.0).submodel.label == "blocks 1-9 + 1-9"
    assert published().scheduler.schedule(3.5).submodel.label == "blocks 1-9 + 1-9"
    assert published(models=1).scheduler.schedule(2.0).submodel == published().main
    assert published(models=1).scheduler.schedule(7 / 6).submodel == published().main
    mixed = published().scheduler.schedule(7 / 6)
    assert [[n + 1 for n in peer.learn] for (peer,) in peers_of(mixed)] == TABLE[1][1]
    assert runs_of(mixed) == [[*range(1, 10)]] * 6


def test_a_plan_by_ratio_has_no_budget_to_keep() -> None:
    task = make_task(ratios=(0.5,), budgets=(1000,))
    fedepth = FeDepth(task, FeDepth.Options(assign="ratio"))
    plan = fedepth.plan(fedepth.setup(), Device(0, "half", 1000, ratio=0.5), 0)
    assert plan.budget is None
    assert plan.predicted is not None
    assert plan.predicted > 1000
    assert not method().options.ignores_budgets


def test_ratios_cannot_be_read_from_bytes() -> None:
    fedepth = FeDepth(make_task(budgets=(10**6,)), FeDepth.Options(assign="ratio"))
    with pytest.raises(ConfigError, match=r"needs a fleet that is given by ratios"):
        fedepth.plan(fedepth.setup(), Device(0, "1MB", 10**6), 0)


# ---- models of one's own


@pytest.mark.parametrize(
    ("model", "anatomy"), [("depth_cases:sequential", {}), ("depth_cases:Renamed", RENAMED)]
)
def test_other_names_make_no_difference(model: str, anatomy: dict[str, str]) -> None:
    fedepth = FeDepth(make_task(model, anatomy=anatomy))
    assert fedepth.task.hidden_shapes == method().task.hidden_shapes
    # A list of layers holds its input until it is through: a little more for the whole.
    budget = int(0.7 * whole_peak(method()))
    assert runs_of(fedepth.scheduler.schedule(budget)) == runs_of(
        method().scheduler.schedule(budget)
    )


def test_layers_without_weights_can_be_blocks() -> None:
    fedepth = FeDepth(make_task("depth_cases:perceptron"))
    schedule = fedepth.scheduler.schedule(whole_peak(fedepth) - 1)
    assert [number for run in runs_of(schedule) for number in run] == [1, 2, 3, 4]
    assert schedule.stages[0].trainable is not None
    assert "model.0" not in schedule.stages[0].trainable  # A flatten has nothing to learn.
    assert start(fedepth).tensors.keys() == FeDepth(fedepth.task).setup().tensors.keys()


@pytest.mark.parametrize(
    ("model", "args", "anatomy", "error", "message"),
    [
        (NARROW, {}, {"block": "x"}, ConfigError, "names stem, blocks and head, not 'block'"),
        (NARROW, {}, {"stem": "no"}, ModelError, "expected the stem of Staged at 'no'"),
        ("in_place_cases:Layerless", {}, {}, ModelError, "no blocks were found in Layerless"),
        ("in_place_cases:Ladder", {}, {}, ModelError, "what Ladder makes of its blocks"),
        ("linear", {}, {}, ModelError, "has no blocks between stem and head"),
    ],
)
def test_models_that_cannot_be_taken_apart(
    model: str, args: dict[str, Any], anatomy: dict[str, str], error: type, message: str
) -> None:
    fedepth = FeDepth(make_task(model, args, anatomy=anatomy))
    for budget in (1000, 10**9):
        with pytest.raises(error, match=message):
            fedepth.scheduler.schedule(budget)
    # Who trains it as a whole does not have to take it apart.
    assert fedepth.scheduler.schedule(None).submodel == fedepth.main
