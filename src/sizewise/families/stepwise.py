"""Layer by layer: the base of methods that train layers at full width before a narrow head.

A configuration is a model whose first layers have full width and whose others, the head, have a
common fraction of it; some of the full layers are frozen. A layer is what adds a group of channels
of its own: a convolution with its norm; projections belong to the layer whose sum they join. Where
the width drops inside a residual stream, the first channels of the shortcut are kept.

This file makes configurations and knows what they cost. Which ones are trained, when and by whom is
the method's business.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from sizewise.common.widths import named
from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import Channels, Kept, trace
from sizewise.errors import ModelError
from sizewise.exchange.plan import Piece
from sizewise.exchange.view import View
from sizewise.families.base import Method
from sizewise.fleet.devices import Device, ratio_of
from sizewise.memory import accounting
from sizewise.surgery import norms
from sizewise.training import loop
from sizewise.training.task import Task


class Stepwise(Method):
    """FedAvg on a model that becomes narrower on the way."""

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of all methods with configurations.

        Attributes:
            assign: Whether configurations must fit bytes; or, to reproduce the paper, the fleet's
                ratios by the paper's accounting (`accounting.hooks`).
        """

        assign: Literal["bytes", "ratio"] = "bytes"

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self.ignores_budgets = self.options.assign == "ratio"
        norms.refuse_apart(task.recipe.norm, type(self).__name__.lower())
        self._bytes: dict[tuple[int, int, float], int] = {}
        self._counted: dict[float, int] = {}

    # ---- layers

    @cached_property
    def channels(self) -> Channels:
        """The layers: groups of channels, of which a residual stream has one for each block."""
        pair = self.task.inputs(2)
        found = trace(self.task.build(), pair, loose=True)
        if not found.groups:
            raise ModelError(
                f"{self.task.model.name!r} has no layer that could be narrower; "
                f"{type(self).__name__.lower()} needs a deeper model, or use fedavg"
            )
        return found

    @cached_property
    def traced(self) -> Channels:
        """What configurations are cut from."""
        return self.channels

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.channels.groups)

    @cached_property
    def largest(self) -> int:
        """The channels of the widest layer: widths are told apart by no less than one of them."""
        return max(group.size for group in self.channels.groups)

    def names(self, frozen: int) -> tuple[str, ...] | None:
        """Return the parameters that learn when so many layers are frozen; None is all."""
        if not frozen:
            return None
        found = ((name, self.channels.layer(name)) for name, _ in self._parameters)
        return tuple(name for name, layer in found if layer is None or layer >= frozen)

    @cached_property
    def _parameters(self) -> list[tuple[str, torch.Size]]:
        return [(name, p.shape) for name, p in self.pattern(self.main).named_parameters()]

    # ---- configurations

    def piece(self, full: int, width: float) -> Piece:
        """Return the model with so many layers at full width and the others at another."""
        if width == 1:
            return self.main
        return Piece(f"{full} full, head {named(width)}", {"full": full, "width": width})

    def build(self, piece: Piece) -> nn.Module:
        """Build a configuration's model, cut from a fresh full one."""
        full = self.task.build()
        if not piece.cut:
            return full
        return self._shrunk(full, piece)

    def _shrunk(self, full: nn.Module, piece: Piece, check: bool = False) -> nn.Module:
        return shrinking.shrink(full, self.channels, self._chosen(piece), check=check)

    def kept(self, piece: Piece) -> Kept | None:
        """Return the channels that a configuration keeps; None if it is the whole model."""
        return self._chosen(piece) if piece.cut else None

    def _chosen(self, piece: Piece) -> Kept:
        full, width = piece.cut["full"], piece.cut["width"]
        return selection.keep(
            self.channels, lambda g: 1.0 if g.index < full else width, rounding="floor_min1"
        )

    def view(self, piece: Piece) -> View:
        """Return which channels of the server's tensors a configuration consists of."""
        if not piece.cut:
            return super().view(piece)
        if piece.size not in self._views:
            slots = shrinking.view(self.channels, self._chosen(piece))
            names = loop.own_tensors(self.module(self.main))
            self._views[piece.size] = {name: slots[name] for name in names}
        return self._views[piece.size]

    # ---- costs

    def parameter_count(self, full: int, width: float, frozen: int = 0) -> int:
        """Return how many parameters of a configuration learn."""
        view, names = self.view(self.piece(full, width)), self.names(frozen)
        whole = {name: torch.empty(shape, device="meta") for name, shape in self._parameters}
        return sum(prod(view[name].shape(whole)) for name in names or whole)

    def bytes_of(self, full: int, frozen: int, width: float) -> int:
        """Return the bytes of a configuration, predicted or as the paper counts them."""
        key = (full, frozen, width)
        if key not in self._bytes:
            # Cut for this only: a search looks at too many models to keep them.
            piece, module = self.piece(full, width), self.pattern(self.main)
            module = self._shrunk(module, piece) if piece.cut else module
            stage = replace(self.stages(0)[0], trainable=self.names(frozen))
            if self.options.assign == "ratio":
                self._bytes[key] = accounting.hooks(module, self._images, stage.trainable)
            else:
                try:
                    self._bytes[key] = self.predicted(module, stage).footprint.peak
                except ModelError:
                    if width < 1:  # Which layer is to blame is known to the check.
                        self._shrunk(self.task.build(), self.piece(full, width), check=True)
                    raise
        return self._bytes[key]

    def capacity(self, device: Device) -> int | None:
        """Return what a device can hold, in those of `bytes_of`; None is all."""
        return device.memory if self.options.assign == "bytes" else self.counted(ratio_of(device))

    def counted(self, ratio: float) -> int:
        """Return the bytes of the whole model at a width, as the paper counts them."""
        if ratio not in self._counted:
            self._counted[ratio] = accounting.hooks(self.task.build(min(ratio, 1)), self._images)
        return self._counted[ratio]

    @property
    def _images(self) -> torch.Tensor:
        return self.task.inputs(self.task.recipe.batch)
