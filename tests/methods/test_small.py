from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from conftest import devices_of
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.state import State
from sizewise.families.submodels import Width
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.small import Small
from sizewise.runs.preparation import bytes_of_ratio
from sizewise.training.task import Task

Tasks = Callable[..., Task]
Run = Callable[..., State]


def rigid(classes: int) -> nn.Module:
    """A model whose factory takes no width; its weights are large, so that one can tell."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4, classes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(100)
    return model


def test_width_is_what_the_smallest_budget_holds(make_task: Tasks, federate: Run) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.25, 0.5, 1))
    method = Small(task)
    assert (method.main, method.main.label) == (Width(0.25), "width 0.25")
    state = method.setup()
    assert state.facts(Width) == Width(0.25)
    assert state.tensors["blocks.0.conv.weight"].shape == (4, 2, 3, 3)
    sizes = {method.plan(state, device, 0).submodel.label for device in devices_of(task)}
    assert sizes == {"width 0.25"}
    trained = federate(method, 2)
    assert list(method.deploy(trained)) == ["width 0.25"]


def test_one_byte_less_is_one_step_narrower(make_task: Tasks) -> None:
    task = make_task(args={"hidden": [16, 16]}, shares=(0.5, 1))
    assert Small(task).main.width == 0.5
    poorer = replace(task, budgets=(task.budgets[0] - 1, None))  # type: ignore[operator]
    assert Small(poorer).main.width == 7 / 16


def test_it_is_fedavg_at_that_width(make_task: Tasks, federate: Run) -> None:
    task = make_task("cnn", {"layers": [8, 16]})
    expected = federate(FedAvg(task, FedAvg.Options(width=0.5))).tensors
    found = federate(Small(task, Small.Options(width=0.5))).tensors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_is_not_cut_from_the_large_model(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.5, 1))
    small, large = (m.setup().tensors["stem.conv.weight"] for m in (Small(task), FedAvg(task)))
    assert not torch.equal(small, large[:4])


def test_budgets_that_hold_nothing_are_passed_over_and_refused(make_task: Tasks) -> None:
    task = make_task(args={"hidden": [16, 16]})
    method = Small(replace(task, budgets=(10, bytes_of_ratio(task, 0.5), None)))
    assert method.main.width == 0.5
    with pytest.raises(BudgetTooSmall):
        method.plan(method.setup(), Device(0, "tiny", 10), 0)
    nobody = Small(replace(task, budgets=(10,)))
    assert nobody.main.width == 1 / 16


def test_widths_that_the_model_cannot_have_are_not_tried(make_task: Tasks) -> None:
    # A sixteenth of 6 and 5 units is none; the narrowest that exists is 4/16.
    method = Small(replace(make_task(), budgets=(10,)))
    assert method.main.width == 0.25


def test_unlimited_devices_train_the_full_model(make_task: Tasks) -> None:
    assert Small(make_task()).main == Width()


def test_model_without_a_width_is_cut_and_drawn_anew(make_task: Tasks, federate: Run) -> None:
    task = make_task(f"{__name__}:rigid", {})
    method = Small(task, Small.Options(width=0.5))
    tensors = method.setup().tensors
    assert tensors["0.weight"].shape == (4, 1, 3, 3)
    assert tensors["3.weight"].shape == (3, 16)
    assert all(tensor.abs().max() <= 1 for tensor in tensors.values())
    again = Small(task, Small.Options(width=0.5)).setup().tensors
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    other = Small(replace(task, seed=1), Small.Options(width=0.5)).setup().tensors
    assert not torch.equal(tensors["0.weight"], other["0.weight"])
    assert list(method.deploy(federate(method, 1))) == ["width 0.5"]


@pytest.mark.parametrize("width", [0.0, -1.0, 1.5])
def test_width_outside_its_range_is_refused(width: float) -> None:
    with pytest.raises(ConfigError, match=r"method\.width must be in \(0, 1\]"):
        Small.Options(width=width)
