"""Models that come from Python: what they are called, and how they are told apart."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sizewise.errors import ConfigError, ModelError
from sizewise.models import at_hand, build, factory
from sizewise.models.memory import Built, Given, identity, understood


def top(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))


class Net(nn.Module):
    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.first, self.slope = nn.Linear(4, 4), slope
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.leaky_relu(self.first(x), self.slope))  # type: ignore[no-any-return]


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.elu(self.first(x), self.slope))  # type: ignore[no-any-return]


Other.__name__ = "Net"  # As when a cell of a notebook is changed and run again.


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (top, f"{__name__}:top"),
        (Net, f"{__name__}:Net"),
        (Other, "memory:Other"),
        (lambda classes: top(classes), "memory:<lambda>"),
        (partial(top, classes=3), "memory:partial"),
    ],
)
def test_what_can_be_imported_is_named_so(model: Any, name: str, monkeypatch: Any) -> None:
    monkeypatch.delattr(f"{__name__}.Other")
    found = understood(model)
    assert isinstance(found, Given)
    assert (found.name, found.make, found.weights) == (name, model, None)
    assert found.table() == {"name": name}


def test_a_function_inside_another_came_from_memory() -> None:
    def inner(classes: int) -> nn.Module:
        return top(classes)

    found = understood(inner)
    assert isinstance(found, Given)
    assert found.name == "memory:inner"
    assert understood("preresnet20") == "preresnet20"


def test_a_built_model_is_copied_with_its_weights() -> None:
    model = Net().eval()
    found, before = understood(model), model.first.weight.detach().clone()
    assert isinstance(found, Given)
    assert found.name == "memory:Net"
    assert found.table()["weights"].startswith("memory:")
    with torch.no_grad():
        model.first.weight.zero_()
    one, two = found.make(), found.make()
    assert torch.equal(one.get_parameter("first.weight"), before)
    assert one.training
    assert one.get_parameter("first.weight") is not two.get_parameter("first.weight")
    other = understood(model)
    assert isinstance(other, Given)
    assert other.weights != found.weights


@pytest.mark.parametrize(("model", "came"), [(None, "NoneType"), (3, "int"), ([Net()], "list")])
def test_anything_else_is_one_sentence(model: Any, came: str) -> None:
    with pytest.raises(ConfigError, match=rf"an nn\.Module, or a function .*; a {came} came"):
        understood(model)


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (Net, True),
        (lambda: Net(0.1), True),
        (lambda: Net(0.2), False),
        (Other, False),
        (lambda: nn.Sequential(nn.Linear(4, 3)), False),
        (lambda: Net().double().float(), True),
    ],
    ids=["other weights", "same", "argument", "function", "layers", "converted"],
)
def test_the_hash_is_of_layers_shapes_and_calls(make: Callable[[], nn.Module], same: bool) -> None:
    sample = torch.ones(2, 4)
    assert (identity(make(), sample) == identity(Net(), sample)) == same


def test_looking_at_a_model_changes_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).train()
    before, random = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    identity(model, torch.ones(2, 4))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)


def test_a_built_model_takes_no_options() -> None:
    shape = {"classes": 3, "image": (4,)}
    with at_hand("memory:Net", Built(Net())):
        assert isinstance(build("memory:Net", **shape), Net)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="with slope = 1: it is built already, so it takes no"):
            build("memory:Net", **shape, args={"slope": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the model 'Net' was given in memory; give it again"):
        factory("memory:Net")
