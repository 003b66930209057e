"""Channels last: faster where it is right, and right everywhere."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sizewise import config as configs
from sizewise.errors import ConfigError
from sizewise.memory.prediction import Meter, predict
from sizewise.runs import session
from sizewise.steps.optimizers import Sgd
from sizewise.steps.step import training_step
from sizewise.torch_tools import layout

LAST = layout.Arrangement(channels_last=True)


def narrow(channels: int) -> nn.Module:
    """A 1x1 convolution with a stride, of few channels, which torch 2.13 gets wrong."""
    layers = [nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 8, 1, stride=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(288, 5))


def gradients(module: nn.Module, images: Tensor) -> list[Tensor]:
    module(images).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("channels", range(1, 10))
def test_narrow_convolutions_with_a_stride_stay_right(channels: int) -> None:
    torch.manual_seed(channels)
    module, images = narrow(channels), torch.randn(4, 3, 16, 16)
    last = layout.laid_out(copy.deepcopy(module), LAST)
    assert last[0](images).is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(gradients(module, images), gradients(last, images), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


def test_contiguous_is_as_it_was() -> None:
    module = narrow(4)
    assert layout.laid_out(module, layout.Arrangement()) is module
    assert all(parameter.is_contiguous() for parameter in module.parameters())


class Odd(nn.Module):
    """Computes something else when its weights have another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(1) * self.conv.weight.stride(1)


def test_a_model_that_computes_something_else_is_refused_or_left_alone() -> None:
    images = torch.randn(2, 2, 8, 8)
    assert layout.arranged(narrow(4), torch.randn(2, 3, 16, 16), "channels_last") == LAST
    assert layout.arranged(Odd(), images, "contiguous") == layout.Arrangement()
    assert layout.arranged(Odd(), images, "auto") == layout.Arrangement()
    with pytest.raises(ConfigError, match="changes what the model computes, first seen in the"):
        layout.arranged(Odd(), images, "channels_last")


class Wrong(nn.Conv2d):
    """A convolution with an error, like torch's own, for images that are channels last."""

    def forward(self, x: Tensor) -> Tensor:
        wrong = x.shape[1] > 1 and x.is_contiguous(memory_format=torch.channels_last)
        return super().forward(x) * (2 if wrong else 1)


@pytest.mark.parametrize("asked", ["channels_last", "auto"])
def test_only_convolutions_that_go_wrong_get_their_images_channels_first(asked: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 6, 3), Wrong(6, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten()
    )
    images = torch.randn(4, 3, 12, 12)
    found = layout.arranged(module, images, asked)  # type: ignore[arg-type]
    assert [kind[0] for kind in found.first] == [Wrong]
    last = layout.laid_out(copy.deepcopy(module), found)
    assert last[0](images).is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(gradients(module, images), gradients(last, images), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


def test_auto_leaves_wide_models_and_those_without_images_alone() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert layout.arranged(narrow(4), torch.randn(2, 3, 16, 16), "auto") == LAST
    wide = nn.Sequential(nn.Conv2d(3, 384, 3), nn.Conv2d(384, 384, 3))
    assert layout.arranged(wide, images, "auto") == layout.Arrangement()
    flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    assert layout.arranged(flat, images, "channels_last") == layout.Arrangement()


@pytest.mark.parametrize("channels", [4, 8])
def test_bytes_are_predicted(channels: int) -> None:
    module = layout.laid_out(narrow(channels), LAST)
    images, labels = torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64)
    with Meter() as meter:
        meter.track(module, images, labels)
        training_step(module, Sgd(list(module.parameters())), images, labels)
    assert predict(module, images, labels).peak == meter.peak


def test_runs_have_the_same_bits_for_any_number_of_workers(tmp_path: Path) -> None:
    found = set()
    for workers in (1, 2):
        config = configs.from_dict(
            {
                "rounds": 2,
                "model": {"name": "preresnet8"},
                "data": {"train_limit": 60, "test_limit": 30},
                "fleet": {"devices": 3, "per_round": 3, "ratios": [0.25, 0.5, 1.0]},
                "method": {"name": "heterofl"},
                "recipe": {"batch": 8, "eval_batch": 30},
                "engine": {"layout": "channels_last", "workers": workers},
            }
        )
        with session.started(config, tmp_path / str(workers)) as federation:
            found.add(federation.run()["state_sha256"])
    assert len(found) == 1
