import copy

import pytest
import torch
from torch import nn

from sizewise.models import build
from sizewise.surgery.scaling import Place, scale

IMAGES = torch.randn(6, 1, 4, 4)


def network() -> nn.Module:
    """Convolutions in front of norms, and one in front of nothing."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten()
    )


@pytest.mark.parametrize("place", ["norm", "conv"])
def test_scaler_right_before_a_batch_norm_has_no_effect_beyond_its_epsilon(place: Place) -> None:
    plain = build("cnn", classes=3, image=(1, 4, 4), args={"layers": [4, 6]})
    for layer in plain.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps = 1e-12
    scaled = scale(copy.deepcopy(plain), 0.25, place)
    torch.testing.assert_close(scaled(IMAGES), plain(IMAGES))


def test_scaler_matters_where_no_norm_follows() -> None:
    plain = network()
    torch.testing.assert_close(
        scale(copy.deepcopy(plain), 0.5, "norm")(IMAGES), plain(IMAGES), rtol=1e-3, atol=1e-3
    )
    scaled = scale(copy.deepcopy(plain), 0.5, "conv")
    # The last convolution's output is what comes out; the first is normalised again.
    torch.testing.assert_close(scaled(IMAGES), 2 * plain(IMAGES), rtol=1e-3, atol=1e-3)


def test_hidden_linear_layers_are_scaled_like_convolutions_and_the_last_is_not() -> None:
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3))
    scaled = scale(copy.deepcopy(plain), 0.5, "conv")
    x = 2 * plain[1](plain[0](IMAGES))
    torch.testing.assert_close(scaled(IMAGES), plain[3](2 * plain[2](x)))
    only_norms = scale(copy.deepcopy(plain), 0.5, "norm")
    assert torch.equal(only_norms(IMAGES), plain(IMAGES))


def test_linear_layers_on_tokens_are_left_alone() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.query(x).mean(1))

    plain, tokens = Tokens(), torch.randn(2, 3, 4)
    assert torch.equal(scale(copy.deepcopy(plain), 0.5, "conv")(tokens), plain(tokens))


def test_inputs_of_every_kind_of_norm_are_divided() -> None:
    for norm in (nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.BatchNorm1d(4)):
        seen: list[torch.Tensor] = []
        model = nn.Sequential(nn.Identity(), norm)
        scale(model, 0.25, "norm")
        norm.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        x = torch.randn(3, 4, 5) if not isinstance(norm, nn.LayerNorm) else torch.randn(3, 4)
        model(x)
        assert torch.equal(seen[0], 4 * x)


@pytest.mark.parametrize("place", ["norm", "conv"])
def test_evaluation_is_not_scaled(place: Place) -> None:
    plain = network().eval()
    scaled = scale(copy.deepcopy(plain), 0.5, place)
    assert torch.equal(scaled(IMAGES), plain(IMAGES))
    # Static batch norm: the norms of a model in evaluation train.
    plain[1].train()
    scaled[1].train()  # type: ignore[index]
    assert torch.equal(scaled(IMAGES), plain(IMAGES))


@pytest.mark.parametrize(("rate", "place"), [(1.0, "conv"), (1.0, "norm"), (0.5, "none")])
def test_nothing_is_hooked_where_nothing_is_to_be_done(rate: float, place: Place) -> None:
    model = scale(network(), rate, place)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_copy_follows_its_own_mode() -> None:
    scaled = scale(network(), 0.5, "conv")
    other = copy.deepcopy(scaled).eval()
    assert scaled.training
    expected = copy.deepcopy(scaled).eval()(IMAGES)
    assert torch.equal(other(IMAGES), expected)
    assert not torch.equal(scaled(IMAGES), expected)
