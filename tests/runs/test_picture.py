"""What a plan trains, part by part."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from sizewise import methods
from sizewise.exchange.plan import Plan, TrainingStage
from sizewise.fleet.devices import Device
from sizewise.runs import picture
from sizewise.training.task import Task


class Plain(nn.Module):
    """Has neither stem nor blocks nor head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 4), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(x.flatten(1)).relu())
        return logits


def parts(task: Task, method: str, plan: Plan | None = None) -> dict[str, tuple[float, list[int]]]:
    made = methods.find(method)(task)
    state = made.setup()
    plan = plan or made.plan(state, Device(0, "a", task.budgets[0]), 0)
    found = picture.parts(
        made, state, plan, picture.full_shapes(made), picture.part_names(made, state)
    )
    return {part["name"]: (part["width"], part["stages"]) for part in found}


def test_everything_learns_in_one_stage(make_task: Callable[..., Task]) -> None:
    names = ["stem", "block 1", "head"]
    assert parts(make_task(), "fedavg") == dict.fromkeys(names, (1.0, [1]))


@pytest.mark.parametrize("method", ["heterofl", "small"])
def test_widths_are_shares_of_the_whole_model(make_task: Callable[..., Task], method: str) -> None:
    """Half of 8 and of 6 hidden channels; the server's own model may be narrow, as for small."""
    task = make_task(args={"hidden": [8, 6]}, shares=[0.5])
    found = parts(task, method)
    assert found["block 1"] == (0.5, [1])
    # (16 inputs x 8, cut to half) and its bias likewise; 6 x 3 cut in its inputs, its bias whole.
    assert found["stem"] == (0.5, [1])
    assert found["head"][0] == pytest.approx((18 * 0.5 + 3) / 21, abs=1e-4)


def test_stages_and_frozen_parts(make_task: Callable[..., Task]) -> None:
    task = make_task()
    made = methods.find("fedavg")(task)
    stages = (TrainingStage(0.1, 1, ("head",), "a"), TrainingStage(0.1, 1, ("blocks", "head"), "b"))
    found = parts(task, "fedavg", Plan(0, 0, "a", made.main, stages))
    assert found == {"stem": (1.0, []), "block 1": (1.0, [2]), "head": (1.0, [1, 2])}


def test_other_models_show_their_children(make_task: Callable[..., Task]) -> None:
    found = parts(make_task("test_picture:Plain", args={}), "fedavg")
    assert found == {"first": (1.0, [1]), "second": (1.0, [1])}
