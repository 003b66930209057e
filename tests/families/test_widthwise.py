from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import devices_of
from sizewise import config as configs
from sizewise.errors import BudgetTooSmall, ConfigError, ModelError
from sizewise.families.submodels import CACHED_VIEWS, Width
from sizewise.families.widthwise import Widths, Widthwise
from sizewise.fleet.devices import Device
from sizewise.memory.prediction import predict
from sizewise.methods.fedrolex import FedRolex, Window
from sizewise.runs import preparation
from sizewise.runs.federation import check_fleet
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def make(task: Task, **options: Any) -> Widthwise:
    return Widthwise(task, Widthwise.Options(**options))


def test_widths_are_sixteenths_unless_they_are_given(make_task: Tasks) -> None:
    assert make(make_task()).widths == tuple(n / 16 for n in range(1, 17))
    assert make(make_task(), widths=(1, 0.25, 0.25, 0.5)).widths == (0.25, 0.5, 1)


def test_ratios_of_the_fleet_are_the_widths_where_they_assign(make_task: Tasks) -> None:
    task = replace(make_task(), ratios=(0.25, 0.5, 2.0))
    method = make(task, assign="ratio")
    assert method.widths == (0.25, 0.5, 1.0)
    assert method.setup().facts(Widths) == Widths((0.25, 0.5, 1.0))
    plan = method.plan(method.setup(), Device(0, "rich", 1, ratio=2.0), 0)
    assert (plan.submodel, plan.budget) == (Width(), None)
    assert method.options.ignores_budgets
    assert not make(task).options.ignores_budgets


def test_assigning_by_ratio_needs_a_fleet_with_ratios() -> None:
    config = configs.from_dict(
        {
            "model": {"name": "mlp"},
            "method": {"name": "heterofl", "assign": "ratio"},
            "fleet": {"budgets": ["1MB", "2MB"]},
        }
    )
    setting = preparation.prepare(config)
    with pytest.raises(ConfigError, match=r"needs a fleet that is given by ratios; .*") as caught:
        check_fleet(setting.method, setting.fleet, setting.start)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["heterofl", "fjord", "fedrolex", "feddropout", "splitmix"])
def test_fleet_by_ratios_is_assigned_by_ratios(method: str) -> None:
    config = configs.from_dict(
        {
            "model": {"name": "mlp", "args": {"hidden": [16]}},
            "method": {"name": method, "assign": "ratio"},
            "fleet": {"devices": 4, "per_round": 4, "ratios": [0.25, 0.5, 1, 2]},
        }
    )
    setting = preparation.prepare(config)
    state = setting.method.setup()
    plans = [setting.method.plan(state, d, 0) for d in setting.fleet.sample(0, 0)]
    assert [plan.budget for plan in plans] == [None] * 4
    if method == "splitmix":
        assert [len(p.submodel.numbers) for p in plans] == [1, 2, 4, 4]
    else:
        assert [p.submodel.width for p in plans] == [0.25, 0.5, 1, 1]


def test_widest_that_fits_is_exact(make_task: Tasks) -> None:
    method = make(make_task("cnn", {"layers": [16, 16]}))
    stage = method.task.stage(0)
    for width in (1 / 16, 5 / 16, 1.0):
        peak = method.peak(method.narrow(width), stage)
        assert method.widest(peak) == width
        if width > 1 / 16:
            assert method.widest(peak - 1) == width - 1 / 16
    with pytest.raises(BudgetTooSmall) as caught:
        method.widest(100)
    assert caught.value.needed == method.peak(method.narrow(1 / 16), stage)
    assert method.widest(None) == 1


def test_footprint_is_that_of_the_model_when_it_is_cut(make_task: Tasks) -> None:
    method = make(make_task("cnn", {"layers": [8, 8]}, momentum=0.0))
    stage = method.task.stage(0)
    batch = torch.empty(4, 1, 4, 4, device="meta")
    expected = predict(method.submodels.build(method.narrow(0.5)), batch)
    assert method.cost(Width(0.5), stage).footprint.parameters == expected.parameters
    assert method.peak(method.narrow(0.5), stage) < method.peak(Width(), stage)


def test_widths_of_the_fleet_are_deployed_and_tiny_devices_passed_over(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.25, 0.5))
    method = make(replace(task, budgets=(1, *task.budgets)))
    assert method.fitting() == [0.25, 0.5]
    assert list(method.deploy(method.setup())) == ["width 0.25", "width 0.5"]
    assert make(replace(task, budgets=(1,))).fitting() == [1]


@pytest.mark.parametrize(("rounding", "units"), [("ceil", 2), ("floor", 1), ("floor_min1", 1)])
def test_rounding_is_chosen(rounding: str, units: int, make_task: Tasks) -> None:
    method = make(make_task(args={"hidden": [6]}), rounding=rounding)
    assert method.submodels.module(method.narrow(0.25)).get_parameter("head.weight").shape == (
        3,
        units,
    )


def test_rounding_that_leaves_nothing_says_so(make_task: Tasks) -> None:
    method = make(make_task(args={"hidden": [6]}), rounding="floor")
    with pytest.raises(ModelError, match=r"leaves none of 6 channels"):
        method.submodels.module(method.narrow(0.125))


def test_state_is_that_of_the_full_model(make_task: Tasks) -> None:
    task = make_task("cnn", shares=(0.5, 1))
    expected = task.build().state_dict()
    found = make(task).setup().tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("policy", ["per_width_stats", "per_submodel"])
def test_tensors_that_are_kept_apart_have_the_shape_of_their_width(
    policy: str, make_task: Tasks
) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.25, 1), norm=policy)
    tensors = make(task).setup().tensors
    assert tensors["stem.norm.running_var@full"].tolist() == [1] * 8
    assert tensors["stem.norm.running_var@width 0.25"].tolist() == [1] * 2
    assert ("stem.norm.weight@width 0.25" in tensors) == (policy == "per_submodel")
    assert ("stem.norm.weight" in tensors) == (policy == "per_width_stats")


def test_views_that_come_and_go_are_forgotten(make_task: Tasks) -> None:
    method = FedRolex(make_task(), FedRolex.Options(widths=(0.5, 1)))
    for number in range(CACHED_VIEWS + 10):
        method.submodels.view(Window(0.5, number))
    assert len(method.submodels._views) <= CACHED_VIEWS


def test_every_device_of_a_plan_gets_what_the_state_holds(make_task: Tasks) -> None:
    task = make_task("densenet10", {"growth": 4}, shares=(0.25, 0.5, 1))
    method = make(task, assign="ratio")
    state = method.setup()
    for device in devices_of(task):
        submodel = method.plan(state, device, 0).submodel
        own = method.submodels.module(submodel).state_dict()
        view = method.submodels.view(submodel)
        assert {n: tuple(t.shape) for n, t in own.items()} == {
            name: place.shape(state.tensors) for name, place in view.items()
        }


@pytest.mark.parametrize("widths", [(0.0,), (0.5, 1.5), (-1.0,), (float("nan"),)])
def test_widths_outside_their_range_are_refused(widths: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"method\.widths must all be in \(0, 1\]"):
        Widthwise.Options(widths=widths)


def test_widths_that_are_close_are_submodels_of_their_own(make_task: Tasks) -> None:
    method = make(make_task("cnn", {"layers": [16, 16]}), widths=(0.5, 0.50001))
    one, other = method.narrow(0.5), method.narrow(0.50001)
    assert (one.label, other.label) == ("width 0.5", "width 0.50001")
    stage = method.task.stage(0)
    assert method.peak(one, stage) < method.peak(other, stage)
    for submodel, channels in ((one, 8), (other, 9)):
        shapes = [
            len(p)
            for name, p in method.submodels.module(submodel).named_parameters()
            if "conv" in name
        ]
        assert shapes
        assert set(shapes) == {channels}
        whole = method.task.build().state_dict()
        held = {
            name: tuple(t.shape)
            for name, t in method.submodels.module(submodel).state_dict().items()
        }
        assert {
            n: tuple(place.shape(whole)) for n, place in method.submodels.view(submodel).items()
        } == held
