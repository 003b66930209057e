"""Nested widths: a model and the narrower ones inside it, trained together on one device.

FjORD draws a width for every batch, slimmable training runs them all. The narrower models own
nothing: their tensors are slices of the widest's, so their gradients land where they belong. Only
tensors that the norm policy keeps apart for each width are their own.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sizewise.common.widths import named
from sizewise.exchange.plan import Submodel, Plan
from sizewise.exchange.state import State
from sizewise.exchange.view import Index, TensorSlice, View, cut
from sizewise.families.widthwise import Widthwise
from sizewise.fleet.devices import Device
from sizewise.surgery import norms
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
                _forget(module, name)

    def forward(self, x: Tensor, width: float | None = None) -> Tensor:
        """Return the logits (B, classes) of one width; default: the widest."""
        if width is None or width == self.widths[-1]:
            logits: Tensor = self.widest(x)
            return logits
        number = self.widths.index(width)
        tensors = dict(self.widest.named_parameters()) | dict(self.widest.named_buffers())
        shared = cut(tensors, self._shared[number])
        return functional_call(self.narrow[number], shared, (x,), strict=False)  # type: ignore[no-any-return]


def _forget(module: nn.Module, name: str) -> None:
    """Let a module keep a tensor's place but not the tensor: it is given one for each call."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    table = owner._parameters if leaf in owner._parameters else owner._buffers
    table[leaf] = None


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


class NestedWidths(Widthwise):
    """Base of the methods whose devices train all widths up to their own."""

    def trainee(self, width: float) -> Submodel:
        """Return the piece of a width with all narrower ones inside it."""
        within = [inner for inner in self.widths if inner < width]
        if not within:
            return self.piece(width)
        return Submodel(f"widths up to {named(width)}", {"width": width, "within": within})

    def most(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the plan for the largest width of a device, whatever it draws."""
        piece = self.trainee(Widthwise.width(self, device, round_index))
        plan = Plan(device.id, round_index, device.group, piece, self.stages(round_index))
        return self.affordable(plan, device)

    def build(self, piece: Submodel) -> nn.Module:
        """Build a piece's model, around the narrower ones if it has any."""
        within = piece.cut.get("within")
        if not within:
            return super().build(piece)
        return Nested(
            self.build(self.piece(piece.cut["width"])),
            {width: self._inner(width, piece.cut["width"]) for width in within},
            piece.cut["width"],
        )

    def _inner(self, width: float, outer: float) -> tuple[nn.Module, View]:
        """Return a narrower model, and where its tensors are in the outer one."""
        module = self.build(self.piece(width))
        apart = norms.kept_apart(module, self.task.recipe.norm)
        wide, narrow = self.view(self.piece(outer)), self.view(self.piece(width))
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

    def view(self, piece: Submodel) -> View:
        """Return a piece's tensors: those of its width, and what inner widths keep apart."""
        within = piece.cut.get("within")
        if not within:
            return super().view(piece)
        if piece.size not in self._views:
            own = own_tensors(self.module(piece))
            outer = self.view(self.piece(piece.cut["width"]))
            slots = {f"widest.{name}": slot for name, slot in outer.items()}
            for number, width in enumerate(within):
                inner = self.view(self.piece(width))
                slots |= {f"narrow.{number}.{name}": slot for name, slot in inner.items()}
            self._views[piece.size] = {name: slots[name] for name in own}
        return self._views[piece.size]
