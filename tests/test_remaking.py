"""Copies of modules have the same structure, and tensors of another kind."""

import torch
from torch import nn

from sizewise.remaking import clone, remade


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
