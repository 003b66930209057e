from dataclasses import replace
from typing import Any

import pytest
import torch

from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.view import cut
from sizewise.families.stepwise import Stepwise
from sizewise.fleet.devices import Device
from sizewise.memory import accounting
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task


def method(model: str = "resnet8", assign: Any = "bytes") -> Stepwise:
    task = Task(ModelConfig(model), Recipe(batch=4), (1, 8, 8), classes=3)
    return Stepwise(task, Stepwise.Options(assign))


@pytest.fixture(scope="module")
def resnet() -> Stepwise:
    return method()


def test_layers_are_convolutions_with_their_norms(resnet: Stepwise) -> None:
    assert resnet.layers == 7
    assert resnet.largest == 64
    assert resnet.names(0) is None
    learning = resnet.names(5) or ()
    # Projections go with the second convolution of their block, which is the fifth layer.
    assert "blocks.1.projection.conv.weight" not in learning
    assert "blocks.1.norm2.weight" not in learning
    assert {name.rsplit(".", 1)[0] for name in learning} == {
        *(f"blocks.2.{part}" for part in ("conv1", "norm1", "conv2", "norm2")),
        *(f"blocks.2.projection.{part}" for part in ("conv", "norm")),
        "head.linear",
    }


def test_a_configuration_is_full_first_and_narrow_after(resnet: Stepwise) -> None:
    piece = resnet.piece(2, 0.25)
    shapes = {name: tuple(p.shape) for name, p in resnet.build(piece).named_parameters()}
    assert shapes["stem.conv.weight"] == (16, 1, 3, 3)
    assert shapes["blocks.0.conv1.weight"] == (16, 16, 3, 3)
    assert shapes["blocks.0.conv2.weight"] == (4, 16, 3, 3)
    assert shapes["blocks.1.conv1.weight"] == (8, 4, 3, 3)
    assert shapes["blocks.2.norm2.weight"] == (16,)
    assert shapes["head.linear.weight"] == (3, 16)
    parts = cut(resnet.setup().tensors, resnet.view(piece))
    assert {name: tuple(parts[name].shape) for name in shapes} == shapes
    assert resnet.build(piece)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    counts = {n: torch.Size(shape).numel() for n, shape in shapes.items()}
    assert resnet.parameter_count(2, 0.25) == sum(counts.values())
    stem = sum(count for name, count in counts.items() if name.startswith("stem"))
    assert resnet.parameter_count(2, 0.25, frozen=1) == sum(counts.values()) - stem


def test_a_head_of_full_width_is_the_model_itself(resnet: Stepwise) -> None:
    assert resnet.piece(3, 1.0) == resnet.main
    assert resnet.parameter_count(3, 1.0) == sum(
        p.numel() for p in resnet.task.build().parameters()
    )


def test_cost_falls_with_frozen_layers_and_width(resnet: Stepwise) -> None:
    whole = resnet.bytes_of(3, 0, 0.5)
    assert resnet.bytes_of(3, 2, 0.5) < whole
    assert resnet.bytes_of(3, 0, 0.25) < whole


def test_bytes_or_ratios_say_what_a_device_can_hold(resnet: Stepwise) -> None:
    assert resnet.capacity(Device(0, "a", 1000, ratio=0.5)) == 1000
    assert resnet.capacity(Device(0, "a")) is None
    by_ratio = method(assign="ratio")
    assert by_ratio.ignores_budgets
    images = torch.empty((4, 1, 8, 8), device="meta")
    half = accounting.hooks(by_ratio.task.build(0.5), images)
    assert by_ratio.capacity(Device(0, "a", 1000, ratio=0.5)) == half
    # More than a whole model is a whole model.
    assert by_ratio.counted(2.0) == accounting.hooks(by_ratio.task.build(), images)
    with pytest.raises(ConfigError, match="needs a fleet that is given by ratios"):
        by_ratio.capacity(Device(0, "a", 1000))


def test_models_without_layers_and_norms_kept_apart_are_refused(resnet: Stepwise) -> None:
    with pytest.raises(ModelError, match="no layer that could be narrower; stepwise needs"):
        _ = method("linear").channels
    apart = replace(resnet.task, recipe=Recipe(norm="per_submodel"))
    with pytest.raises(ConfigError, match="stepwise"):
        Stepwise(apart)


def test_heads_that_are_close_are_pieces_of_their_own(resnet: Stepwise) -> None:
    one, other = resnet.piece(2, 0.5), resnet.piece(2, 0.516)
    close = resnet.piece(2, 0.5001)
    assert len({one.size, other.size, close.size}) == 3
    assert close.size == "2 full, head 0.5001"
    assert resnet.piece(2, 33 / 64).size == "2 full, head 33/64"
    assert resnet.parameter_count(2, 0.5) < resnet.parameter_count(2, 33 / 64)
    # Three digits would call both 0.516.
    assert resnet.piece(2, 33 / 64).size != other.size
