"""Models that cutting by width meets with trouble, as configs name them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FULL = 8
"""Their channels."""

counts = True
"""Whether `Counting` blocks look at how many channels there are."""


def _net(channels: int, classes: int, *blocks: nn.Module) -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(FULL, classes))
    return nn.Sequential(nn.Conv2d(channels, FULL, 3, padding=1), *blocks, head)


class Counting(nn.Module):
    """Computes something else when it has other channels: nothing but the numbers shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(FULL, FULL, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        extra = float(counts and x.shape[1] != FULL)
        return x + F.relu(self.conv(x) + extra)


def counting(channels: int, classes: int) -> nn.Module:
    return _net(channels, classes, nn.Identity(), Counting())


class Heads(nn.Module):
    """Stores the size of its heads: with fewer channels it has fewer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(FULL, 3 * FULL)
        self.out = nn.Linear(FULL, FULL)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, -1, 2)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (tokens + self.out(found)).transpose(1, 2).unflatten(-1, x.shape[2:])


def heads(channels: int, classes: int) -> nn.Module:
    return _net(channels, classes, nn.AvgPool2d(2), Heads())


class Mapped(nn.Module):
    """Adds a map of one channel to all channels, which broadcasting takes care of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(FULL, FULL, 3, padding=1)
        self.map = nn.Conv2d(FULL, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return y + self.map(y)


def mapped(channels: int, classes: int) -> nn.Module:
    return _net(channels, classes, Mapped(), Mapped())


class Gated(nn.Module):
    """ECA: a convolution along the channels, which must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.along(x.mean((2, 3)).unsqueeze(1)).squeeze(1)
        return x * torch.sigmoid(gate)[..., None, None]


def gated(channels: int, classes: int) -> nn.Module:
    return _net(channels, classes, Gated(), nn.Conv2d(FULL, FULL, 3, padding=1))


def whole(channels: int, classes: int) -> nn.Module:
    """Return a model in which nothing can be cut."""
    return _net(channels, classes, Gated())
