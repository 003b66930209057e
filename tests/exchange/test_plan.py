"""Plans travel as plain values; those that are alike but for their devices go together."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizewise.common.structure import plain
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, TrainingStage, Work, portions, read_plan
from sizewise.families.submodels import Width
from sizewise.methods.fedepth.blocks import Blocks, Run, TakenApart
from sizewise.methods.fedrolex import Window

KINDS = [
    Plan(0, 3, "any", Width(), (TrainingStage(0.1, 1),)),
    Plan(0, 3, "any", Width(0.5), (TrainingStage(0.1, 1),)),
    Plan(0, 3, "any", Width(), (TrainingStage(0.2, 1),)),
    Plan(0, 3, "any", Width(), (TrainingStage(0.1, 1),), budget=9),
]


def test_runs_by_hand() -> None:
    plans = [replace(KINDS[kind], device=number) for number, kind in enumerate([0, 0, 0, 1, 0, 3])]
    devices = [[plan.device for plan in run] for run in portions(plans, lambda plan: 2)]
    assert devices == [[0, 1], [2], [3], [4], [5]]


@given(
    kinds=st.lists(st.integers(0, len(KINDS) - 1), max_size=30),
    most=st.integers(0, 5),
)
def test_nothing_is_lost_and_runs_are_alike(kinds: list[int], most: int) -> None:
    plans = [replace(KINDS[kind], device=number) for number, kind in enumerate(kinds)]
    found = portions(plans, lambda plan: most)
    assert [plan for run in found for plan in run] == plans
    for run in found:
        assert len(run) <= max(most, 1)
        assert all(replace(plan, device=0) == replace(run[0], device=0) for plan in run)


@pytest.mark.parametrize("plan", KINDS)
def test_a_plan_is_read_as_it_was_written(plan: Plan) -> None:
    assert read_plan(json.loads(json.dumps(plain(plan))), Width, Work) == plan


def test_a_method_reads_its_own_submodels_and_works() -> None:
    run = Run(Blocks((2, 3), (0, 1), stem=False, micro=4), (Blocks((0, 1, 2, 3)),))
    stage = TrainingStage(0.1, 2, ("model.blocks.2",), run, part=(1, 3))
    plan = Plan(7, 3, "any", TakenApart(True, (2,), 1, "blocks 3-4"), (stage,), 10, 9)
    read = read_plan(json.loads(json.dumps(plain(plan))), TakenApart, Run)
    assert read == plan
    assert read.submodel.label == "blocks 3-4"


def test_submodels_are_told_apart_by_values_and_share_what_goes_by_shape() -> None:
    assert Width(0.5) != Width(0.50001)
    assert Window(0.5, 1) != Window(0.5, 2)
    assert Window(0.5, 1).shape_key == Window(0.5, 2).shape_key == Window(0.5)
    assert TakenApart(True, label="one") == TakenApart(True, label="other"), "labels are for people"


def test_what_a_plan_must_not_hold_is_refused() -> None:
    values = plain(KINDS[0])
    with pytest.raises(ConfigError, match=r"unknown key 'plan\.submodel\.depth'"):
        read_plan({**values, "submodel": {"depth": 3}}, Width, Work)
