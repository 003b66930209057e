"""What a task builds."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sizewise.training.task import Task


@pytest.mark.parametrize(("model", "width"), [("mlp", 1.0), ("cnn", 0.5), ("preresnet20", 0.25)])
def test_a_sketch_has_the_shapes_and_no_weights(
    make_task: Callable[..., Task], model: str, width: float
) -> None:
    task = make_task(model)
    sketch = replace(task, sketched=True)
    drawn, hollow = task.build(width), sketch.build(width)
    assert all(parameter.is_meta for parameter in hollow.parameters())
    assert {name: t.shape for name, t in hollow.state_dict().items()} == {
        name: t.shape for name, t in drawn.state_dict().items()
    }


def test_what_a_sketch_consists_of_is_found_by_running_the_model(
    make_task: Callable[..., Task],
) -> None:
    task = make_task("cnn")
    sketch = replace(task, sketched=True)
    assert sketch.parts == task.parts
    assert sketch.hidden_shapes == task.hidden_shapes
    assert not any(parameter.is_meta for parameter in sketch.build_to_run().parameters())
