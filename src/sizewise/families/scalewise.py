"""Submodels: the base of methods whose devices train fewer channels, fewer blocks, or both.

Which submodels there are is found from the fleet's bytes, or given by the user. Each is a real
model: the full one cut to some of its channels (`cutting`), without some of its blocks
(`dropping`).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

from torch import nn

from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import Channels, Kept
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Piece
from sizewise.exchange.view import Slot, View
from sizewise.families.base import Method
from sizewise.surgery import norms, submodels
from sizewise.surgery.dropping import drop_blocks, stages
from sizewise.surgery.submodels import Submodel
from sizewise.torch_tools.dry_run import on_meta
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

SHARES = 32
"""Where submodels are found from bytes, their share of the parameters is one part in so many."""


class Scalewise(Method):
    """FedAvg on submodels."""

    @dataclass(frozen=True)
    class Options(Method.Options):
        """Options of all methods with submodels.

        Attributes:
            scaling: What is smaller in a submodel.
            shares: The submodels' shares of the model's parameters; default: found from bytes.
            published: Take the submodels of the NeFL paper.
            widths: Or name them: the ratio of channels of each.
            blocks: The numbers of the blocks that each keeps, counted from 0.
            assign: Whether submodels must fit a device's bytes; or, to reproduce papers, go by the
                rank of its ratio.
        """

        scaling: submodels.Scaling = "both"
        shares: tuple[float, ...] = ()
        published: bool = False
        widths: tuple[float, ...] = ()
        blocks: tuple[tuple[int, ...], ...] = ()
        assign: Literal["bytes", "ratio"] = "bytes"

        def __post_init__(self) -> None:
            named = self.widths or self.blocks
            if sum(map(bool, (self.shares, self.published, named))) > 1:
                raise ConfigError(
                    "submodels are given by method.shares, by method.published, or by "
                    "method.widths and method.blocks; choose one of the three"
                )
            if self.widths and self.blocks and len(self.widths) != len(self.blocks):
                raise ConfigError(
                    f"method.widths and method.blocks describe the same submodels, but "
                    f"{len(self.widths)} and {len(self.blocks)} came"
                )
            for name in ("shares", "widths"):
                if not all(0 < value <= 1 for value in getattr(self, name)):
                    raise ConfigError(f"method.{name} must all be above 0 and at most 1")

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self.ignores_budgets = self.options.assign == "ratio"
        self._peaks: dict[Submodel, int] = {}

    # ---- the model

    @cached_property
    def _example(self) -> nn.Module:
        """A full model that is never changed."""
        return self.task.build()

    @property
    def channels(self) -> Channels:
        """What hangs together in the server's model."""
        return self.task.channels

    @cached_property
    def traced(self) -> Channels | None:
        """What submodels are cut from; None if they all have every channel."""
        widths = {piece.cut.get("width", 1.0) for piece in self.submodels}
        return self.channels if widths != {1.0} else None

    def build(self, piece: Piece) -> nn.Module:
        """Build a submodel from a fresh full model."""
        return self.reduced(self.task.build(), piece)

    def reduced(self, model: nn.Module, piece: Piece, check: bool = True) -> nn.Module:
        """Turn a full model into a submodel.

        Args:
            model: A full model, which may be changed.
            piece: The submodel.
            check: Make sure that the cut model still computes what it should.
        """
        kept = self.kept(piece)
        if kept is not None:
            model = shrinking.shrink(model, self.channels, kept, check=check)
        return drop_blocks(model, self.parts, self.shapes, self.kept_blocks(piece))

    def kept_blocks(self, piece: Piece) -> Sequence[int]:
        """Return the numbers of the blocks of a submodel."""
        found: Sequence[int] = piece.cut.get("blocks", range(len(self.parts.blocks)))
        return found

    def kept(self, piece: Piece) -> Kept | None:
        """Return the channels that a submodel keeps of each group; None if it keeps all."""
        width = piece.cut.get("width", 1.0)
        return None if width == 1 else selection.keep(self.channels, width)

    def cuts(self) -> Sequence[Piece]:
        """Return the narrowest and the widest of the submodels that lack channels."""
        cut = [piece for piece in self.submodels if self.kept(piece) is not None]
        cut.sort(key=lambda piece: float(piece.cut["width"]))
        return [*cut[:1], *cut[-1:]]

    def view(self, piece: Piece) -> View:
        """Return where a submodel's tensors live: in the full ones, or in its own."""
        if piece.size not in self._views:
            module = self.module(piece)
            shared = self._shared(piece)
            self._views[piece.size] = norms.separate(shared, self.apart(module), piece.size)
        return self._views[piece.size]

    def _shared(self, piece: Piece) -> View:
        """Return where a submodel's tensors would live if none were its own."""
        kept = self.kept(piece)
        slots = {} if kept is None else shrinking.view(self.channels, kept)
        # A block that is left out may be the first place of a tied tensor.
        first = {n: self.first_names.get(n, n) for n in own_tensors(self.module(piece))}
        return {name: slots.get(first[name], Slot(first[name])) for name in first}

    def apart(self, module: nn.Module) -> set[str]:
        """Return the names of the tensors of a submodel that are its own."""
        return norms.kept_apart(module, self.task.recipe.norm)

    # ---- which submodels there are

    @cached_property
    def submodels(self) -> tuple[Piece, ...]:
        """All submodels, smallest first."""
        options, layout = self.options, stages(self.shapes)
        shares = options.shares or (self.task.ratios if options.assign == "ratio" else ())
        if options.published:
            chosen = submodels.published(self.task.model.name, options.scaling)
        elif options.widths or options.blocks:
            pairs = zip_longest(options.widths, options.blocks)
            listed = (Submodel(width or 1.0, blocks) for width, blocks in pairs)
            chosen = sorted(listed, key=lambda one: self.share(self._cut(one)))
        elif shares:
            capped = sorted(min(share, 1.0) for share in shares)
            chosen = [submodels.scaled(share, options.scaling, layout) for share in capped]
        else:
            found = (self._fitting(memory, layout) for memory in self.task.budgets)
            # Where nobody can hold any, the smallest says what it would take.
            chosen = [submodel for submodel in found if submodel] or [self._smallest]
        distinct = dict.fromkeys(chosen)
        return tuple(self.piece(number, submodel) for number, submodel in enumerate(distinct))

    def _fitting(self, memory: int | None, layout: Sequence[range]) -> Submodel | None:
        """Return the largest submodel that fits a budget; None if none does."""
        if memory is None:
            return Submodel()
        family = [
            submodels.scaled((part + 1) / SHARES, self.options.scaling, layout)
            for part in range(SHARES)
        ]
        fitting = bisect_right(family, memory, key=self._cost)
        return family[fitting - 1] if fitting else None

    def _cost(self, submodel: Submodel) -> int:
        """Return the bytes of training a submodel."""
        if submodel not in self._peaks:
            sketch = self._sketch(self._cut(submodel))
            self._peaks[submodel] = self.predicted(sketch, self.stages(0)[0]).footprint.peak
        return self._peaks[submodel]

    @property
    def _smallest(self) -> Submodel:
        return submodels.scaled(1 / SHARES, self.options.scaling, stages(self.shapes))

    @cached_property
    def least(self) -> int | None:
        """The bytes of the smallest submodel that there could be, where they are found."""
        options = self.options
        if options.published or options.widths or options.blocks or options.shares:
            return None
        return self._cost(self._smallest)

    def _sketch(self, cut: Mapping[str, Any]) -> nn.Module:
        """Return a submodel without data, to learn its cost from."""
        sketch = self.reduced(on_meta(self._example), Piece(cut=cut), check=False)
        sketch.train()  # As models are built, so that what is known of either serves both.
        learn = {name: p.requires_grad for name, p in self._example.named_parameters()}
        for name, parameter in sketch.named_parameters():
            parameter.requires_grad_(learn.get(name, True))
        return sketch

    def peak(self, piece: Piece) -> int:
        """Return the bytes of one training step of a submodel."""
        return self.footprint(piece, self.stages(0)[0]).peak

    def piece(self, number: int, submodel: Submodel) -> Piece:
        """Return a submodel as a piece, named after its share; the whole model is the server's."""
        cut = self._cut(submodel)
        if cut == {"width": 1.0}:
            return self.main
        return Piece(f"submodel {number + 1} ({self.share(cut):.2f})", cut)

    def _cut(self, submodel: Submodel) -> dict[str, Any]:
        """Return what a submodel keeps, JSON-able; raise ConfigError if it cannot."""
        cut: dict[str, Any] = {"width": submodel.width}
        if submodel.blocks is not None:
            cut["blocks"] = sorted(set(submodel.blocks))
            count = len(self.parts.blocks)
            if not cut["blocks"] or cut["blocks"][0] < 0 or cut["blocks"][-1] >= count:
                raise ConfigError(
                    f"a submodel keeps some of the model's blocks 0 to {count - 1}, not "
                    f"{cut['blocks']}; see method.blocks"
                )
            if len(cut["blocks"]) == count:
                del cut["blocks"]
        return cut

    def share(self, cut: Mapping[str, Any]) -> float:
        """Return a submodel's share of the model's parameters: NeFL's gamma."""
        return _count(self._sketch(cut)) / self._whole

    @cached_property
    def _whole(self) -> int:
        return _count(self._sketch({}))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
