import pytest
import torch
from torch import nn

from sizewise.flops import per_sample
from sizewise.step import cross_entropy

BATCH = torch.empty(2, 1, 2, 2, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")


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
    assert per_sample(chain(), *BATCH, cross_entropy, trainable) == expected


def test_convolution_by_hand() -> None:
    conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    forward, head = 2 * 2 * 9 * 4, 2 * 8 * 3
    assert per_sample(model, *BATCH, cross_entropy, None) == 2 * forward + 3 * head


def test_model_is_not_touched() -> None:
    model = chain().eval()
    before = [parameter.clone() for parameter in model.parameters()]
    per_sample(model, *BATCH, cross_entropy, ("3",))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))
    assert not model.training
