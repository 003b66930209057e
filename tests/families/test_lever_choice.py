"""The cheapest levers that fit are taken, before less of the model is."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from conftest import devices_of
from sizewise import config as configs
from sizewise.common.structure import plain
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import TrainingStage, Work, read_plan
from sizewise.families.base import Method
from sizewise.families.lever_choice import LeverChoice, combinations, most_frugal
from sizewise.families.submodels import Width
from sizewise.fleet.devices import Device
from sizewise.methods.fedepth import FeDepth
from sizewise.methods.heterofl import HeteroFL
from sizewise.runs import preview
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.recipe import Recipe
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def test_without_levers_there_is_the_plain_step_alone() -> None:
    assert combinations(Recipe(), 1, divides=True) == (NONE,)


def test_parts_are_halved_down_to_the_smallest() -> None:
    recipe = Recipe(batch=32, levers=("microbatch",))
    assert combinations(recipe, 4, divides=True) == (
        NONE,
        *(Levers(micro_batch=size) for size in (16, 8, 4)),
    )
    sizes = [c.micro_batch for c in combinations(replace(recipe, batch=10), 1, divides=True)]
    assert sizes == [None, 5, 3, 2], "the size of the largest of 2, 4 and 8 parts"
    assert combinations(recipe, 4, divides=False) == (NONE,)


def test_what_needs_no_further_operations_comes_first() -> None:
    found = combinations(Recipe(batch=8, levers=("auto",)), 4, divides=True)
    assert found[:3] == (NONE, Levers(step_in_backward=True), Levers(micro_batch=4))
    costs = [levers.checkpoint for levers in found]
    assert costs == sorted(costs)
    assert found[-1] == Levers(4, True, (), False, "bfloat16", "bfloat16")
    assert len(set(found)) == len(found) == 2 * 2 * 2 * 3
    assert set(most_frugal(found)) == {
        Levers(size, True, (), size is None, state, "bfloat16")
        for size in (None, 4)
        for state in ("float32", "bfloat16")
    }


def test_levers_that_a_recipe_forbids_are_left_out() -> None:
    clipped = combinations(Recipe(levers=("auto",), clip=1.0), 4, divides=True)
    assert not any(levers.step_in_backward for levers in clipped)
    plain_sgd = combinations(Recipe(levers=("auto",), momentum=0.0), 4, divides=True)
    assert {levers.state for levers in plain_sgd} == {"float32"}


@pytest.mark.parametrize("levers", [["auto", "checkpoint"], ["none", "microbatch"], []])
def test_auto_and_none_stand_alone(levers: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.levers is 'none', 'auto' or a list of levers"):
        configs.from_dict({"recipe": {"levers": levers}})


def test_one_word_stands_for_a_list_and_an_unknown_one_is_named() -> None:
    assert configs.from_dict({"recipe": {"levers": "auto"}}).recipe.levers == ("auto",)
    with pytest.raises(ConfigError, match=r"levers\[0\] cannot be 'chekpoint'; did you mean"):
        configs.from_dict({"recipe": {"levers": ["chekpoint"]}})


def test_the_whole_model_in_fewer_bytes_before_less_of_it(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.85, 1), batch=16)
    weak, strong, _ = devices_of(task)
    plain_method = HeteroFL(task)
    squeezed = HeteroFL(replace(task, recipe=replace(task.recipe, levers=("auto",))))
    less = plain_method.plan(plain_method.setup(), weak, 0)
    whole = squeezed.plan(squeezed.setup(), weak, 0)
    assert less.submodel.label != "full"
    assert whole.submodel.label == "full"
    assert whole.stages[0].levers != NONE
    assert (whole.predicted or 0) <= (weak.memory or 0)
    assert squeezed.plan(squeezed.setup(), strong, 0).stages[0].levers == NONE
    values = json.loads(json.dumps(plain(whole)))
    assert read_plan(values, HeteroFL.submodel_type, Work) == whole


def test_the_first_that_fits_is_taken(make_task: Tasks) -> None:
    method = Method(make_task("cnn", batch=8, levers=("auto",)))
    state, stage = method.setup(), method.task.stage()
    needs = [
        (method.peak(Width(), replace(stage, levers=one)), one) for one in method.levers.choices
    ]
    for budget in sorted({peak for peak, _ in needs}):
        plan = method.plan(state, Device(0, "any", budget), 0)
        expected = next(levers for peak, levers in needs if peak <= budget)
        assert plan.stages[0].levers == expected
    least = method.levers.least(Width())
    assert method.plan(state, Device(0, "any", least), 0).predicted == least
    with pytest.raises(BudgetTooSmall) as caught:
        method.plan(state, Device(0, "any", min(peak for peak, _ in needs) - 1), 0)
    assert caught.value.needed == least, "what it says would do, does"


def test_fedepth_trains_the_whole_model_if_levers_allow(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 8, 16]}, shares=(0.85,), batch=16)
    device, *_ = devices_of(task)
    runs = FeDepth(task).plan(FeDepth(task).setup(), device, 0)
    method = FeDepth(replace(task, recipe=replace(task.recipe, levers=("auto",))))
    plan = method.plan(method.setup(), device, 0)
    assert len(runs.stages) > 1
    assert [stage.work.label for stage in plan.stages] == ["all"]
    assert plan.stages[0].levers != NONE


def test_a_preview_says_which_levers_and_what_they_cost() -> None:
    rows = preview.rows(
        configs.from_dict(
            {
                "model": {"name": "preresnet8"},
                "method": {"name": "fedavg"},
                "fleet": {"ratios": [0.6, 1.0]},
                "recipe": {"levers": "auto"},
            }
        )
    )
    weak, strong = rows
    assert weak["refused"] is None
    assert weak["levers"]
    assert weak["stages"][0]["levers"] == weak["levers"]
    assert weak["more_flops"] >= 1
    assert (strong["levers"], strong["more_flops"]) == ("", 1)


def test_what_refuses_levers_is_asked_once(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, batch=16)
    task = replace(task, recipe=replace(task.recipe, levers=("auto",)))
    asked: list[tuple[float, Levers]] = []

    def peak(submodel: Width, stage: TrainingStage) -> int:
        if stage.levers != NONE:
            asked.append((submodel.width, stage.levers))
        if stage.levers.checkpoint:
            raise ConfigError("no")
        return 1000 - 10 * (stage.levers.micro_batch is not None)

    choice = LeverChoice(task, peak, divides=True)
    assert [choice.least(Width(width)) for width in (1.0, 0.5, 0.25)] == [990] * 3
    refused = [width for width, levers in asked if levers.checkpoint]
    assert set(refused) == {1.0}
    assert choice.cheapest(Width(0.5), task.stage(), 995).levers.micro_batch is not None
