"""HeteroFL: each device trains the first channels of every layer, as many as it can hold.

Diao, Ding, Tarokh: "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021 (https://arxiv.org/abs/2010.01264).

    device k:  w_k <- SGD on the model whose layers keep the first ceil(r_k W) of W channels
    server:    each entry of w <- mean over the devices whose submodel holds it; others stay

The published code also divides by r_k before each norm in training (`scaler = "norm"`), ignores the
classes that a device does not own (`mask_labels`), clips gradients to 1 (`recipe.clip`), counts all
devices the same (`recipe.weighting = "equal"`) and evaluates with static batch norm
(`recipe.norm = "sbn"`). Here all of that is off until asked for. `levels = "dynamic"` draws a
device's width anew each round, up to what it can hold. `slimmable` trains all narrower widths as
well, in every batch: "SHeteroFL" of SplitMix and FeDepth.

Widths are found from bytes; the paper's five levels are `widths = [1, 0.5, 0.25, 0.125, 0.0625]`.

Discloses: the trained weights of each device, to the server; with `mask_labels` also which classes
it has.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sizewise.common import rng
from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.plan import Plan, TrainingStage, Update
from sizewise.exchange.view import Tensors
from sizewise.families.nested import NestedSubmodels, NestedWidth, NestedWidths
from sizewise.families.options import acts_only
from sizewise.fleet.devices import Device
from sizewise.steps.step import Loss, cross_entropy, masked_cross_entropy
from sizewise.surgery.scaling import Place, scale
from sizewise.training.loop import Shard
from sizewise.training.task import Task


class ScaledSubmodels(NestedSubmodels):
    """Widths whose models divide by their width while they train."""

    def __init__(self, task: Task, rounding: str, scaler: Place) -> None:
        super().__init__(task, rounding)
        self.scaler = scaler

    def alone(self, submodel: NestedWidth) -> nn.Module:
        """Build the model of a width, with its scaler."""
        return scale(super().alone(submodel), submodel.width, self.scaler)


class HeteroFL(NestedWidths):
    """Prefixes of one model, one width for each device."""

    @dataclass(frozen=True)
    class Options(NestedWidths.Options):
        """Options of HeteroFL.

        Attributes:
            levels: Whether a device keeps its width, or draws one of the smaller ones each round.
            proportions: How often each of `widths` is drawn, in their order; default: equally.
            scaler: Where a narrow model divides by its width while it trains: before norms, or
                after convolutions.
            mask_labels: Set the logits of classes that a device lacks to 0, and leave them out of
                its update.
            slimmable: Train all narrower widths in every batch as well.
        """

        levels: Literal["fixed", "dynamic"] = "fixed"
        proportions: tuple[float, ...] = ()
        scaler: Place = "none"
        mask_labels: bool = False
        slimmable: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.slimmable and not self.widths and self.assign == "bytes":
                raise ConfigError(
                    "method.slimmable trains all of method.widths up to a device's own; name a few"
                )
            if self.proportions and len(self.proportions) != len(self.widths):
                raise ConfigError(
                    f"method.proportions needs one number for each of the {len(self.widths)} "
                    f"method.widths, not {len(self.proportions)}"
                )
            if not all(0 < proportion < math.inf for proportion in self.proportions):
                raise ConfigError(
                    f"method.proportions must all be positive numbers, not {list(self.proportions)}"
                )
            dynamic = self.levels == "dynamic"
            acts_only(self, "proportions", "method.levels = 'dynamic'", dynamic)

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        unknown = sorted({min(ratio, 1.0) for ratio in task.ratios} - set(self.options.widths))
        if self.options.proportions and self.options.assign == "ratio" and unknown:
            raise ConfigError(
                f"method.proportions need the ratios of the fleet in method.widths; add {unknown}"
            )
        if self.options.mask_labels:
            task.has_classes("method.mask_labels")
            self.discloses |= {"labels"}

    @cached_property
    def submodels(self) -> ScaledSubmodels:
        """The first channels of every layer, with a scaler."""
        return ScaledSubmodels(self.task, self.options.rounding, self.options.scaler)

    # ---- the server

    def width(self, device: Device, round_index: int) -> float:
        """Return a device's width: what it can hold, or a draw up to that."""
        largest = super().width(device, round_index)
        if self.options.levels == "fixed":
            return largest
        shares = dict(zip(self.options.widths, self.options.proportions, strict=False))
        levels = [width for width in self.widths if width <= largest]
        generator = rng.python_generator(self.task.seed, "level", round_index, device.id)
        return generator.choices(levels, [shares.get(width, 1.0) for width in levels])[0]

    def fitting(self) -> list[float]:
        """Return the widths that devices train: all that anyone can hold, if they train several."""
        largest = super().fitting()
        if self.options.levels == "fixed" and not self.options.slimmable:
            return largest
        return [width for width in self.widths if width <= largest[-1]]

    def trainee(self, width: float) -> NestedWidth:
        """Return the submodel of a width; if it is slimmable, with all narrower ones inside."""
        return super().trainee(width) if self.options.slimmable else NestedWidth(width)

    def unhidden(self) -> str | None:
        """Return that the rows of its classes tell which a device has, if they are sent."""
        told = "it sends the rows of its classes alone; set method.mask_labels = false"
        return told if self.options.mask_labels else super().unhidden()

    # ---- the device

    def loss(self, submodel: Any, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the cross entropy, of the device's own classes if others are masked."""
        loss: Loss = cross_entropy
        if self.options.mask_labels:
            classes = torch.arange(self.task.classes) if shard is None else owned(shard)
            loss = partial(masked_cross_entropy, classes=classes)
        return partial(_each_width, loss=loss) if self.options.slimmable else loss

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, device_state: Tensors) -> Update:
        """Train, and leave out the classifier's rows of classes that the device lacks."""
        update = super().train(plan, tensors, shard, device_state)
        if not self.options.mask_labels:
            return update
        rows, sent = owned(shard), dict(update.tensors)
        names = classifier(self.submodels.module(plan.submodel), self.task.classes)
        sent |= {name: sent[name][rows] for name in names if name in sent}
        return replace(
            update, tensors=sent, rows={name: rows.tolist() for name in names if name in sent}
        )


def _each_width(module: nn.Module, images: Tensor, labels: Tensor, loss: Any) -> Iterator[Tensor]:
    """Yield the loss of every width that is nested in a module."""
    for width in getattr(module, "widths", [None]):
        run = module if width is None else partial(module, width=width)
        yield loss(run, images, labels)


def owned(shard: Shard) -> Tensor:
    """Return the classes or tags that occur in a device's data, ascending int64 (k,)."""
    classes: Tensor = torch.unique(shard.labels[shard.rows])
    return classes[classes >= 0]  # Below are none, such as the tag of padding.


def classifier(module: nn.Module, classes: int) -> list[str]:
    """Return the names of the tensors with one row for each class: those of the last such layer."""
    found = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and layer.out_features == classes
        # Layers of a narrower model inside this one are shells without tensors; see `nested`.
        and next(layer.parameters(), None) is not None
    ]
    if not found:
        raise ModelError(
            f"{type(module).__name__} has no linear layer with {classes} outputs, so its rows of "
            f"one class are unknown; turn method.mask_labels off"
        )
    last = module.get_submodule(found[-1])
    return [f"{found[-1]}.{name}" for name, _ in last.named_parameters()]
