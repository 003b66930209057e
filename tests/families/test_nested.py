"""Narrow models inside a wide one are the separately cut models, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sizewise.exchange.state import State
from sizewise.exchange.view import grid
from sizewise.families.nested import Nested, NestedWidths
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

WIDTHS = (0.3, 0.5, 0.8, 1.0)
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {"hidden": [6, 5]}),
    ("cnn", {"layers": [4, 6]}),
    ("preresnet8", {}),
    ("densenet10", {"growth": 4}),
    ("vit", {"dim": 12, "heads": 2, "depth": 2, "patch": 2}),
    (f"{__name__}:tied", {}),
]
IDS = [name.rpartition(":")[2] for name, _ in MODELS]
Tasks = Callable[..., Task]


class Tied(nn.Module):
    """Two layers that share their weights."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.flatten(1)).relu()).relu()
        return self.head(self.third(x).relu())  # type: ignore[no-any-return]


def tied(classes: int) -> nn.Module:
    return Tied(classes)


def nested(task: Task) -> tuple[NestedWidths, State]:
    """Return a method and a state for all widths, without zeros that could hide a mistake."""
    method = NestedWidths(task, NestedWidths.Options(widths=WIDTHS))
    tensors = {}
    for submodel in map(method.narrow, WIDTHS[::-1]):
        own = own_tensors(method.submodels.build(submodel))
        for local, place in method.submodels.view(submodel).items():
            if place.name not in tensors:
                drawn = torch.rand_like(own[local]) + 0.1 if own[local].ndim else own[local]
                tensors[place.name] = drawn.detach()
    return method, State(tensors)


def filled(method: NestedWidths, state: State, width: float) -> Nested:
    module = method.submodels.filled(method.trainee(width), state)
    assert isinstance(module, Nested)
    return module


@pytest.mark.parametrize("outer", [0.8, 1.0])
@pytest.mark.parametrize(("model", "args"), MODELS, ids=IDS)
def test_every_width_is_the_model_that_was_cut_alone(
    model: str, args: dict[str, Any], outer: float, make_task: Tasks
) -> None:
    norm = {"cnn": "batch", "densenet10": "per_submodel"}.get(model, "per_width_stats")
    method, state = nested(make_task(model, args, norm=norm))
    module = filled(method, state, outer).eval()
    assert module.widths == tuple(width for width in WIDTHS if width <= outer)
    images = torch.randn(5, 1, 4, 4)
    for width in module.widths:
        alone = method.submodels.filled(method.narrow(width), state).eval()
        assert torch.equal(module(images, width=width), alone(images))
    assert torch.equal(module(images), module(images, width=outer))


@pytest.mark.parametrize(("model", "args"), MODELS, ids=IDS)
def test_gradients_of_a_width_land_where_its_weights_are(
    model: str, args: dict[str, Any], make_task: Tasks
) -> None:
    method, state = nested(make_task(model, args))
    module, images = filled(method, state, 1.0), torch.randn(5, 1, 4, 4)
    module(images, width=0.5).square().sum().backward()
    alone, view = (
        method.submodels.filled(method.narrow(0.5), state),
        method.submodels.view(method.narrow(0.5)),
    )
    alone(images).square().sum().backward()
    found = dict(module.widest.named_parameters())
    for name, parameter in alone.named_parameters():
        expected = torch.zeros_like(found[name])
        index = view[name].index
        expected[... if index is None else grid(index, expected.shape)] = parameter.grad
        torch.testing.assert_close(found[name].grad, expected)
        assert ((found[name].grad == 0) >= (expected == 0)).all(), "nothing else moves"


@pytest.mark.parametrize("norm", ["batch", "per_width_stats", "per_submodel"])
def test_narrow_models_own_only_what_is_kept_apart(norm: str, make_task: Tasks) -> None:
    method = NestedWidths(make_task("cnn", norm=norm), NestedWidths.Options(widths=(0.5, 1)))
    module = method.submodels.build(method.trainee(1.0))
    assert isinstance(module, Nested)
    own = {name.rpartition(".")[2] for name in module.narrow[0].state_dict()}
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    expected = {"batch": set(), "per_width_stats": statistics}
    assert own == expected.get(norm, statistics | {"weight", "bias"})


def test_training_a_width_moves_its_own_statistics_alone(make_task: Tasks) -> None:
    method = NestedWidths(
        make_task("cnn", norm="per_width_stats"), NestedWidths.Options(widths=(0.5, 1))
    )
    module = method.submodels.build(method.trainee(1.0)).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module(torch.randn(5, 1, 4, 4), width=0.5)
    moved = {n for n, tensor in module.state_dict().items() if not torch.equal(tensor, before[n])}
    assert moved
    assert all(name.startswith("narrow.0.") for name in moved)


def test_the_narrowest_width_is_a_plain_submodel(make_task: Tasks) -> None:
    method = NestedWidths(make_task(), NestedWidths.Options(widths=(0.5, 1)))
    assert method.trainee(0.5) == method.narrow(0.5)
    assert not isinstance(method.submodels.module(method.trainee(0.5)), Nested)


def test_an_unknown_width_is_an_error(make_task: Tasks) -> None:
    method = NestedWidths(make_task(), NestedWidths.Options(widths=(0.5, 1)))
    with pytest.raises(ValueError, match=r"not in tuple"):
        method.submodels.module(method.trainee(1.0))(torch.randn(2, 1, 4, 4), width=0.7)
