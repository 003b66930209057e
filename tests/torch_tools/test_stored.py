"""Weights in fewer bytes: what is lost, what is tied, what is learned through them."""

import pytest
import torch
from torch import nn

from sizewise.torch_tools.stored import Stored, packed, restore, store, unpacked


class Tied(nn.Module):
    """An embedding whose table is also the last layer, and a layer that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.norm(self.table(ids)))
        return logits


def frozen() -> Tied:
    model = Tied().requires_grad_(False)
    model.norm.requires_grad_(True)
    return model


def test_toy_numbers() -> None:
    weight = torch.tensor([[127.0, -63.6, 0.4], [0.0, 0.0, 0.0], [0.5, 0.25, -0.5]])
    steps, scale = packed(weight, "int8")
    assert steps.tolist() == [[127, -64, 0], [0, 0, 0], [127, 64, -127]]
    assert scale is not None
    assert scale.flatten().tolist() == pytest.approx([1.0, 0.0, 0.5 / 127])
    assert unpacked(steps, scale)[0].tolist() == [127.0, -64.0, 0.0]


@pytest.mark.parametrize(("kind", "loss"), [("bf16", 0.004), ("int8", 0.02)])
def test_a_model_computes_nearly_the_same(kind: Stored, loss: float) -> None:
    model, ids = frozen(), torch.arange(6).view(2, 3)
    expected = model(ids)
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    store(model, kind)
    assert model.out.weight is model.table.weight
    assert model.out.weight.dtype == {"bf16": torch.bfloat16, "int8": torch.int8}[kind]
    assert sum(p.numel() * p.element_size() for p in model.parameters()) < before
    found = model(ids)
    assert 0 < float((found - expected).detach().abs().max()) < loss * 7
    # Gradients are those of the weights as they are stored.
    found.square().sum().backward()  # type: ignore[no-untyped-call]
    gradient = model.norm.weight.grad
    model.zero_grad()
    restore(model)
    assert model.out.weight is model.table.weight
    again = model(ids)
    torch.testing.assert_close(again, found)
    again.square().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(model.norm.weight.grad, gradient)


def test_what_learns_stays_as_it_is() -> None:
    model = Tied()
    store(model, "int8")
    assert model.out.weight.dtype == torch.float32
    assert type(model.out) is nn.Linear
