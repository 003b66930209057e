"""Nested widths: a model and the narrower ones inside it, trained together on one device.

FjORD draws a width for every batch, slimmable training runs them all. The narrower models own
nothing: their tensors are slices of the widest's, so their gradients land where they belong. Only
tensors that the norm policy keeps apart for each width are their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sizewise.common.widths import named
from sizewise.exchange.plan import Plan
from sizewise.exchange.state import State
from sizewise.exchange.view import Index, TensorSlice, View, cut
from sizewise.families.submodels import Width
from sizewise.families.widthwise import WidthSubmodels, Widthwise
from sizewise.fleet.devices import Device
from sizewise.training.loop import own_tensors


class Nested(nn.Module):
    """A model that can also run as any of its narrower selves.

    Attributes:
        widest: The model with all weights.
        narrow: One module for each smaller width, which holds only what is kept apart for it.
        widths: The ratios of `narrow`, ascending, and of `widest`.
    """

    def __init__(
        self, widest: nn.Module, narrower: Mapping[float, tuple[nn.Module, View]], width: float
    ) -> None:
        super().__init__()
        self.widest = widest
        self.narrow = nn.ModuleList(module for module, _ in narrower.values())
        self.widths = (*narrower, width)
        self._shared = tuple(view for _, view in narrower.values())
        for module, shared in zip(self.narrow, self._shared, strict=True):
            for name in shared:
                # It keeps the tensor's place but not the tensor: it is given one for each call.
                path, _, leaf = name.rpartition(".")
                owner = module.get_submodule(path)
                table = owner._parameters if leaf in owner._parameters else owner._buffers
                table[leaf] = None

    def forward(self, x: Tensor, width: float | None = None) -> Tensor:
        """Return the logits (B, classes) of one width; default: the widest."""
        if width is None or width == self.widths[-1]:
            logits: Tensor = self.widest(x)
            return logits
        number = self.widths.index(width)
        tensors = dict(self.widest.named_parameters()) | dict(self.widest.named_buffers())
        shared = cut(tensors, self._shared[number])
        return functional_call(self.narrow[number], shared, (x,), strict=False)  # type: ignore[no-any-return]


def _within(inner: Index | None, outer: Index | None, shape: torch.Size) -> Index | None:
    """Return where the entries of one index are among those of another that has them all."""
    if inner is None:
        return None
    wide = outer or (slice(None),) * len(shape)
    return tuple(
        _positions(torch.arange(size)[own], torch.arange(size)[held])
        for size, own, held in zip(shape, inner, wide, strict=True)
    )


def _positions(entries: Tensor, held: Tensor) -> slice | Tensor:
    at = torch.searchsorted(held, entries)
    start, count = int(at[0]), len(at)
    # Heads and concatenations leave gaps; all else is a slice, which is read without a copy.
    return slice(start, start + count) if int(at[-1]) == start + count - 1 else at


@dataclass(frozen=True)
class NestedWidth(Width):
    """A width, perhaps with narrower ones, ascending, within it."""

    within: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """What people call it."""
        return f"widths up to {named(self.width)}" if self.within else super().label


class NestedSubmodels(WidthSubmodels):
    """Widths, alone or with narrower ones inside."""

    def build(self, submodel: Any) -> nn.Module:
        """Build a submodel's model, around the narrower ones if it has any."""
        if not submodel.within:
            return self.alone(submodel)
        return Nested(
            self.alone(submodel),
            {width: self._inner(width, submodel) for width in submodel.within},
            submodel.width,
        )

    def alone(self, submodel: NestedWidth) -> nn.Module:
        """Build the model of a width without the narrower ones."""
        return super().build(submodel)

    def _inner(self, width: float, outer: NestedWidth) -> tuple[nn.Module, View]:
        """Return a narrower model, and where its tensors are in the outer one."""
        module = self.alone(NestedWidth(width))
        apart = self.apart(module)
        wide, narrow = self.view(replace(outer, within=())), self.view(NestedWidth(width))
        first = {id(tensor): name for name, tensor in own_tensors(module).items()}
        shared = {}
        for local, tensor in module.state_dict(keep_vars=True).items():
            name = first[id(tensor)]  # A tied tensor has a place under each of its names.
            if name not in apart:
                index = _within(narrow[name].index, wide[name].index, self._shapes[name])
                shared[local] = TensorSlice(name, index)
        return module, shared

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in own_tensors(self.task.build()).items()}

    def slices(self, submodel: Any) -> View:
        """Return a submodel's tensors: those of its width, and what inner widths keep apart."""
        if not submodel.within:
            return super().slices(submodel)
        outer = self.view(replace(submodel, within=()))
        places = {f"widest.{name}": place for name, place in outer.items()}
        for number, width in enumerate(submodel.within):
            inner = self.view(NestedWidth(width))
            places |= {f"narrow.{number}.{name}": place for name, place in inner.items()}
        return {name: places[name] for name in own_tensors(self.module(submodel))}


class NestedWidths(Widthwise):
    """Base of the methods whose devices train all widths up to their own."""

    submodel_type: type[NestedWidth] = NestedWidth

    @cached_property
    def submodels(self) -> NestedSubmodels:
        """Widths, alone or with narrower ones inside."""
        return NestedSubmodels(self.task, self.options.rounding, self.rule)

    def trainee(self, width: float) -> NestedWidth:
        """Return the submodel of a width with all narrower ones inside it."""
        return NestedWidth(width, tuple(inner for inner in self.widths if inner < width))

    def plan_upper_bound(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the plan for the largest width of a device, whatever it draws."""
        largest = Widthwise.width(self, device, round_index)
        return self.offer(device, round_index, self.trainee(largest))

    def size_of(self, plan: Plan) -> NestedWidth:
        """Return the width that a device trains, without those inside it."""
        trained: Any = plan.submodel
        return NestedWidth(trained.width)
