"""Copies of modules have the same structure, and tensors of another kind."""

import threading

import pytest
import torch
from torch import nn

from sizewise.errors import ModelError
from sizewise.torch_tools.remaking import clone, plain_tensors, remade


def test_a_copy_is_a_copy() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict({"first": layer, "tied": layer, "norm": nn.BatchNorm1d(2)})
    model.plain = [layer, {"table": (1, 2)}, torch.ones(2)]
    model["norm"].constant = torch.ones(3)
    model["norm"].weight.requires_grad_(False)
    twin = remade(model, lambda tensor: tensor.detach() + 1)
    assert twin["first"] is twin["tied"] is twin.plain[0]  # type: ignore[index]
    assert twin["first"] is not layer
    assert len(twin["first"]._forward_hooks) == 1
    assert twin.plain[1] == {"table": (1, 2)}  # type: ignore[index]
    assert twin.plain[1] is not model.plain[1]  # type: ignore[index]
    assert torch.equal(twin["first"].weight, layer.weight + 1)
    assert torch.equal(twin["norm"].running_mean, torch.ones(2))
    assert torch.equal(twin["norm"].constant, torch.full((3,), 2.0))
    assert [p.requires_grad for p in twin.parameters()] == [True, True, False, True]
    twin["first"]._forward_hooks.clear()
    assert len(layer._forward_hooks) == 1


def test_a_module_that_copies_itself_is_asked_to() -> None:
    class Own(nn.Module):
        def __deepcopy__(self, memo: object) -> "Own":
            made = Own()
            made.copied = True
            return made

    twin = remade(nn.Sequential(nn.Linear(1, 1), Own()), clone)
    assert twin[1].copied  # type: ignore[index]


class Box:
    """Not a container that anybody knows."""


def test_what_a_forward_pass_left_behind_is_copied_without_its_history() -> None:
    model = nn.Linear(2, 2)
    result = model(torch.ones(1, 2))
    box, itself = Box(), [result]
    itself.append(itself)  # type: ignore[arg-type]
    box.result = result  # type: ignore[attr-defined]
    model.direct, model.listed, model.boxed = result, (itself, {"key": result}), box
    model.hidden = [nn.Parameter(torch.ones(3))]  # type: ignore[assignment]
    assert [len(tensor) for tensor in plain_tensors(model)] == [1, 1, 1, 3]
    twin = remade(model, clone)
    assert twin.direct.grad_fn is None  # type: ignore[union-attr]
    assert twin.direct is twin.listed[0][0] is twin.listed[1]["key"] is twin.boxed.result  # type: ignore[index, union-attr]
    assert twin.listed[0][1] is twin.listed[0]  # type: ignore[index]
    assert twin.direct is not result
    assert torch.equal(twin.direct, result)  # type: ignore[arg-type]
    assert isinstance(twin.hidden[0], nn.Parameter)  # type: ignore[index]


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(
        ModelError, match=r"Sequential cannot be copied: layer '1', a Linear: .*lock"
    ):
        remade(model, clone)
