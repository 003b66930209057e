"""Silence: which functions are zero at zero, and what follows for products over channels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from odd_layers import TOKENS, Attention, Words
from sizewise.cutting.channels import trace
from sizewise.cutting.selection import keep, rolling
from sizewise.cutting.verification import verify

SILENT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "times something": lambda x: x * torch.sigmoid(x),
    "twice": lambda x: x + x.sin(),
    "masked by zeros": lambda x: x.masked_fill(torch.ones(5, 1, device=x.device) > 0, 0.0),
    "padded and back": lambda x: F.pad(x, (0, 0, 1, 1))[:, 1:-1],
    "power": lambda x: x.pow(2),
    "over tokens": lambda x: x.cumsum(1),
    "dropout": lambda x: F.dropout(x, 0.1),
    "in place": lambda x: x.mul_(2),
    "both branches": lambda x: torch.where(x > 1, x, x.tanh()),
}
LOUD: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "exp": torch.exp,
    "cos": torch.cos,
    "elu + 1": lambda x: F.elu(x) + 1,
    "minus one": lambda x: x.relu() - 1,
    "softmax over tokens": lambda x: x.softmax(1),
    "masked by ones": lambda x: x.masked_fill(torch.ones(5, 1, device=x.device) > 0, 1.0),
    "padded by ones": lambda x: F.pad(x, (0, 0, 1, 1), value=1.0)[:, :5],
    "noise": lambda x: x + torch.rand_like(x),
    "one branch": lambda x: torch.where(x > 1, x, x.cos()),
    "ones": lambda x: x + torch.ones_like(x),
    "in place": lambda x: x.add_(2),
}


def features(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, bool]:
    """Return a model that sums over its features, and whether these are cut."""
    model = Words(Attention(function))
    channels = trace(model, TOKENS)
    for rule in (rolling(1), rolling(2)):
        assert verify(model, channels, keep(channels, 1 / 2, rule)) < 1e-12
    return model, any(group.name == "layer.query.weight:0" for group in channels.groups)


@pytest.mark.parametrize("name", SILENT)
def test_features_that_are_zero_where_they_are_dropped_are_cut(name: str) -> None:
    assert features(SILENT[name])[1]


@pytest.mark.parametrize("name", LOUD)
def test_features_that_are_not_zero_there_stay_whole(name: str) -> None:
    assert not features(LOUD[name])[1]


def test_weights_make_them_silent_again() -> None:
    class Features(Attention):
        """Attention to what a layer makes of features that are not zero."""

        def __init__(self) -> None:
            super().__init__(torch.sigmoid)
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.function = self.of_keys = lambda x: self.inner(x.sigmoid())
            return super().forward(x)

    model = Words(Features())
    channels = trace(model, TOKENS)
    assert channels.notes == ()
    assert verify(model, channels, keep(channels, 1 / 2)) < 1e-12
