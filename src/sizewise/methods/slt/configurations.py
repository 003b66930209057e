"""SLT's configurations: a model whose first layers have full width and whose others are narrow.

The others, the head, keep a common fraction of their channels. A layer is what adds a group of
channels of its own: a convolution with its norm; projections belong to the layer whose sum they
join. Where the width drops inside a residual stream, the first channels of the shortcut are kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn

from sizewise.common.widths import named
from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import Channels, Kept, trace
from sizewise.errors import ModelError
from sizewise.exchange.plan import Submodel, Work
from sizewise.exchange.view import View
from sizewise.families.submodels import Submodels
from sizewise.training.loop import own_tensors


@dataclass(frozen=True)
class Configuration(Submodel):
    """A model that becomes narrower on the way; without values, the whole model.

    Attributes:
        full: How many layers have full width.
        width: The ratio of channels of the others.
    """

    full: int = 0
    width: float = 1.0

    @property
    def label(self) -> str:
        """What people call it."""
        return "full" if self.width == 1 else f"{self.full} full, head {named(self.width)}"


@dataclass(frozen=True)
class Freezing(Work):
    """Training behind so many frozen layers."""

    layers: int = 0

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{self.layers} frozen"


def configuration(full: int, width: float) -> Configuration:
    """Return the configuration with so many layers at full width and the others at another."""
    return Configuration() if width == 1 else Configuration(full, width)


class LayerSubmodels(Submodels):
    """Configurations of a model."""

    @cached_property
    def channels(self) -> Channels:
        """The layers: groups of channels, of which a residual stream has one for each block."""
        found = trace(self.task.build(), self.task.inputs(2), loose=True)
        if not found.groups:
            raise ModelError(
                f"{self.task.model.name!r} has no layer that could be narrower; "
                f"slt needs a deeper model, or use fedavg"
            )
        return found

    def traced(self, submodels: Iterable[Submodel]) -> Channels:
        """Return the channels that configurations are cut from."""
        return self.channels

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.channels.groups)

    @cached_property
    def largest(self) -> int:
        """The channels of the widest layer: widths are told apart by no less than one of them."""
        return max(group.size for group in self.channels.groups)

    def build(self, submodel: Any) -> nn.Module:
        """Build a configuration's model; narrower ones are cut from the full one."""
        return self.cut(submodel) if submodel.width < 1 else self.task.build()

    def cut(self, submodel: Configuration, check: bool = False) -> nn.Module:
        """Return a configuration's model, to look at; perhaps check what it computes."""
        full, kept = self.pattern(Configuration()), self.kept(submodel)
        return full if kept is None else shrinking.shrink(full, self.channels, kept, check=check)

    def kept(self, submodel: Any) -> Kept | None:
        """Return the channels that a configuration keeps; None if it is the whole model."""
        full, width = submodel.full, submodel.width
        if width == 1:
            return None
        return selection.keep(
            self.channels, lambda g: 1.0 if g.index < full else width, rounding="floor_min1"
        )

    def slices(self, submodel: Any) -> View:
        """Return which channels of the server's tensors a configuration consists of."""
        kept = self.kept(submodel)
        if kept is None:
            return super().slices(submodel)
        places = shrinking.view(self.channels, kept)
        return {name: places[name] for name in own_tensors(self.module(Configuration()))}

    # ---- what learns

    def learning(self, frozen: int) -> tuple[str, ...] | None:
        """Return the parameters that learn when so many layers are frozen; None is all."""
        if not frozen:
            return None
        found = ((name, self.channels.layer(name)) for name, _ in self._parameters)
        return tuple(name for name, layer in found if layer is None or layer >= frozen)

    @cached_property
    def _parameters(self) -> list[tuple[str, torch.Size]]:
        return [(name, p.shape) for name, p in self.pattern(Configuration()).named_parameters()]

    def parameter_count(self, submodel: Configuration, frozen: int = 0) -> int:
        """Return how many parameters of a configuration learn."""
        view, names = self.view(submodel), self.learning(frozen)
        whole = {name: torch.empty(shape, device="meta") for name, shape in self._parameters}
        return sum(prod(view[name].shape(whole)) for name in names or whole)
