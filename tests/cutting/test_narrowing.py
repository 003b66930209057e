"""Models that become narrower on the way."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sizewise.cutting.channels import trace
from sizewise.cutting.narrowing import drop_channels
from sizewise.cutting.selection import keep
from sizewise.cutting.shrinking import shrink, view
from sizewise.exchange.view import cut
from sizewise.models import build

IMAGE = (3, 16, 16)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("resnet20", 19), ("resnet44", 43), ("resnet56", 55), ("densenet40", 39), ("preresnet20", 19)],
)
def test_layers_are_counted_as_in_the_paper(name: str, layers: int) -> None:
    model = build(name, classes=10, image=IMAGE)
    channels = trace(model, torch.empty(2, *IMAGE), loose=True)
    assert len(channels.groups) == layers
    assert not channels.notes


def test_only_streams_are_loose() -> None:
    model = build("resnet20", classes=10, image=IMAGE)
    channels = trace(model, torch.empty(2, *IMAGE), loose=True)
    # A projection joins the layer whose sum it is added to.
    entry = channels.groups[8].members
    assert ("blocks.3.conv2.weight", 0) in entry
    assert any("projection" in name and dim == 0 for name, dim in entry)


@pytest.mark.parametrize("full", [0, 1, 4, 7, 19])
@pytest.mark.parametrize("width", [0.5, 0.25, 0.01])
def test_shortcut_keeps_its_first_channels(full: int, width: float) -> None:
    torch.manual_seed(0)
    model = build("resnet20", classes=5, image=IMAGE).eval()
    channels = trace(model, torch.empty(2, *IMAGE), loose=True)
    kept = keep(channels, lambda g: 1.0 if g.index < full else width, rounding="floor_min1")
    small = shrink(model, channels, kept).eval()
    tensors = cut(model.state_dict(), view(channels, kept))
    images = torch.randn(3, *IMAGE)
    expected = by_hand(tensors, images)
    torch.testing.assert_close(small(images), expected)


def by_hand(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """ResNet-20 of SLT written out, with a shortcut that drops channels."""

    def normalised(path: str, x: torch.Tensor) -> torch.Tensor:
        names = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(x, *(tensors[f"{path}.{name}"] for name in names), training=False)

    def convolved(path: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        return F.conv2d(x, tensors[f"{path}.weight"], stride=stride, padding=1)

    x = F.relu(normalised("stem.norm", convolved("stem.conv", x)))
    for number in range(9):
        block, stride = f"blocks.{number}", 2 if number in (3, 6) else 1
        inner = F.relu(normalised(f"{block}.norm1", convolved(f"{block}.conv1", x, stride)))
        residual = normalised(f"{block}.norm2", convolved(f"{block}.conv2", inner))
        if stride == 2:
            projected = convolved(f"{block}.projection.conv", x, stride)
            x = F.relu(residual + normalised(f"{block}.projection.norm", projected))
        else:
            x = F.relu(residual + x[:, : residual.shape[1]])
    return F.linear(x.mean((2, 3)), tensors["head.linear.weight"], tensors["head.linear.bias"])


def test_sums_outside_the_model_are_left_alone() -> None:
    model = drop_channels(nn.Identity())
    model(torch.zeros(1))
    with pytest.raises(RuntimeError):
        torch.zeros(1, 2, 3, 3) + torch.zeros(1, 4, 3, 3)


def test_a_failing_forward_leaves_nothing_behind() -> None:
    model = drop_channels(nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 3))
    with pytest.raises(RuntimeError):
        torch.zeros(1, 2, 3, 3) + torch.zeros(1, 4, 3, 3)
