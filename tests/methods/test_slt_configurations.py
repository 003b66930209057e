from dataclasses import replace
from typing import Any

import pytest
import torch

from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.view import cut
from sizewise.fleet.devices import Device
from sizewise.memory import accounting
from sizewise.methods.slt import SLT
from sizewise.methods.slt.configurations import configuration
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task


def method(model: str = "resnet8", assign: Any = "bytes") -> SLT:
    task = Task(ModelConfig(model), Recipe(batch=4), (1, 8, 8), classes=3)
    return SLT(task, SLT.Options(assign=assign))


def capacity_of(slt: SLT, device: Device) -> float | None:
    return slt.capacity(slt.options.capacity(device))


@pytest.fixture(scope="module")
def resnet() -> SLT:
    return method()


def test_layers_are_convolutions_with_their_norms(resnet: SLT) -> None:
    assert resnet.submodels.layers == 7
    assert resnet.submodels.largest == 64
    assert resnet.submodels.learning(0) is None
    learning = resnet.submodels.learning(5) or ()
    # Projections go with the second convolution of their block, which is the fifth layer.
    assert "blocks.1.projection.conv.weight" not in learning
    assert "blocks.1.norm2.weight" not in learning
    assert {name.rsplit(".", 1)[0] for name in learning} == {
        *(f"blocks.2.{part}" for part in ("conv1", "norm1", "conv2", "norm2")),
        *(f"blocks.2.projection.{part}" for part in ("conv", "norm")),
        "head.linear",
    }


def test_a_configuration_is_full_first_and_narrow_after(resnet: SLT) -> None:
    submodel = configuration(2, 0.25)
    model, count = resnet.submodels.build(submodel), resnet.submodels.parameter_count
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["stem.conv.weight"] == (16, 1, 3, 3)
    assert shapes["blocks.0.conv1.weight"] == (16, 16, 3, 3)
    assert shapes["blocks.0.conv2.weight"] == (4, 16, 3, 3)
    assert shapes["blocks.1.conv1.weight"] == (8, 4, 3, 3)
    assert shapes["blocks.2.norm2.weight"] == (16,)
    assert shapes["head.linear.weight"] == (3, 16)
    parts = cut(resnet.setup().tensors, resnet.submodels.view(submodel))
    assert {name: tuple(parts[name].shape) for name in shapes} == shapes
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    counts = {n: torch.Size(shape).numel() for n, shape in shapes.items()}
    assert count(submodel) == sum(counts.values())
    stem = sum(count for name, count in counts.items() if name.startswith("stem"))
    assert count(submodel, frozen=1) == sum(counts.values()) - stem


def test_a_head_of_full_width_is_the_model_itself(resnet: SLT) -> None:
    assert configuration(3, 1.0) == resnet.main
    assert resnet.submodels.parameter_count(configuration(3, 1.0)) == sum(
        p.numel() for p in resnet.task.build().parameters()
    )


def test_cost_falls_with_frozen_layers_and_width(resnet: SLT) -> None:
    whole = resnet.bytes_of(3, 0, 0.5)
    assert resnet.bytes_of(3, 2, 0.5) < whole
    assert resnet.bytes_of(3, 0, 0.25) < whole


def test_bytes_or_ratios_say_what_a_device_can_hold(resnet: SLT) -> None:
    assert capacity_of(resnet, Device(0, "a", 1000, ratio=0.5)) == 1000
    assert capacity_of(resnet, Device(0, "a")) is None
    by_ratio = method(assign="ratio")
    assert by_ratio.options.ignores_budgets
    images = torch.empty((4, 1, 8, 8), device="meta")
    half = accounting.hooks(by_ratio.task.build(0.5), images)
    assert capacity_of(by_ratio, Device(0, "a", 1000, ratio=0.5)) == half
    # More than a whole model is a whole model.
    assert by_ratio.capacity(2.0) == accounting.hooks(by_ratio.task.build(), images)
    with pytest.raises(ConfigError, match="needs a fleet that is given by ratios"):
        capacity_of(by_ratio, Device(0, "a", 1000))


def test_models_without_layers_and_norms_kept_apart_are_refused(resnet: SLT) -> None:
    with pytest.raises(ModelError, match="no layer that could be narrower; slt needs"):
        _ = method("linear").submodels.channels
    apart = replace(resnet.task, recipe=Recipe(norm="per_submodel"))
    with pytest.raises(ConfigError, match="slt"):
        SLT(apart)


def test_heads_that_are_close_are_submodels_of_their_own(resnet: SLT) -> None:
    one, other = configuration(2, 0.5), configuration(2, 0.516)
    close = configuration(2, 0.5001)
    assert len({one, other, close}) == 3
    assert len({one.label, other.label, close.label}) == 3
    assert close.label == "2 full, head 0.5001"
    assert configuration(2, 33 / 64).label == "2 full, head 33/64"
    count = resnet.submodels.parameter_count
    assert count(one) < count(configuration(2, 33 / 64))
    # Three digits would call both 0.516.
    assert configuration(2, 33 / 64).label != other.label
