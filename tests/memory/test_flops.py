import pytest
import torch
from torch import nn

from sizewise.memory.prediction import cost

BATCH = torch.empty(2, 1, 2, 2, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")


def per_sample(module: nn.Module, trainable: tuple[str, ...] | None = None) -> int:
    return cost(module, *BATCH, trainable=trainable).flops // len(BATCH[0])


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        # Forward 2*4*5 + 2*5*3; the same for weight gradients; and one gradient of a hidden input.
        (None, 2 * (40 + 30) + 30),
        # Only the last layer: no gradient passes it.
        (("3",), (40 + 30) + 30),
        # Only the first: the last still passes its gradient on.
        (("1",), (40 + 30) + 30 + 40),
    ],
)
def test_linear_layers_by_hand(trainable: tuple[str, ...] | None, expected: int) -> None:
    assert per_sample(chain(), trainable) == expected


def test_convolution_by_hand() -> None:
    conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    forward, head = 2 * 2 * 9 * 4, 2 * 8 * 3
    assert per_sample(model) == 2 * forward + 3 * head


def test_model_is_not_touched() -> None:
    model = chain().eval()
    before = [parameter.clone() for parameter in model.parameters()]
    per_sample(model, ("3",))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))
    assert not model.training


def test_fused_attention_costs_what_its_products_do() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            queries, keys, values = inputs * self.scale, inputs * self.scale, inputs * self.scale
            mixed = nn.functional.scaled_dot_product_attention(queries, keys, values)
            return mixed.mean(dim=(1, 2))

    inputs = torch.empty(2, 3, 5, 8, device="meta")  # heads, tokens, features
    forward = 2 * (2 * 3 * 5 * 8 * 5)
    assert cost(Attention(), inputs).flops // 2 == 3 * forward
