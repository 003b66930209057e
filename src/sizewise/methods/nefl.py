"""NeFL: nested submodels, scaled in width and depth, that keep their norms and step sizes apart.

Kang, Cha, Kang, Ha: "NeFL: Nested Model Scaling for Federated Learning with System Heterogeneous
Clients" (https://arxiv.org/abs/2308.07761).

    submodel i:  a share of the channels (the first ones) and some of the residual blocks,
                 Y <- Y + s_j F_j(Y), with step sizes s_j that learn, from 1
    device k:    a submodel within its reach; E epochs of SGD
    server:      each entry of the consistent weights <- mean over the devices whose submodel has it
                 norms and step sizes of submodel i <- mean over the devices that trained submodel i

A dropped block is not run and not held; of one that begins a stage the projection stays. Which
tensors are inconsistent, that is, kept once for each submodel, is said by `apart`. `steps` may fix
the step sizes at 1, or at values that absorb the missing blocks ("OD" in the paper; "AOD" learns
from there). Submodels are found from the fleet's bytes, given by their share of the parameters,
listed one by one, or the paper's own. A device draws one of those that fit its bytes, up to `reach`
places from the largest; the paper draws up to `reach` places above as well (`assign = "ratio"`).

The public code runs dropped blocks, times 0, and resets to 0 what no submodel of a round has; its
projections of dropped blocks are never averaged. None of this is done here.

Every submodel is deployed.

Discloses: the trained weights of each device, to the server.
"""

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import zip_longest
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from sizewise import cutting, indices, norms, rng, submodels
from sizewise.anatomy import Anatomy
from sizewise.blockwise import hidden_shapes
from sizewise.channels import Channels, Kept, trace
from sizewise.dropping import drop_blocks, stages
from sizewise.dry_run import on_meta
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.fleet import Device, ratio_of
from sizewise.method import Method
from sizewise.plan import Piece, Plan
from sizewise.state import State
from sizewise.step_sizes import StepSize, add_step_sizes
from sizewise.submodels import Submodel
from sizewise.task import Task
from sizewise.training import own_tensors
from sizewise.view import Slot, View

SHARES = 32
"""Where submodels are found from bytes, their share of the parameters is one part in so many."""


class NeFL(Method):
    """Submodels in width and depth."""

    recipe_defaults: ClassVar[Mapping[str, Any]] = {"norm": "tracked"}

    @dataclass(frozen=True)
    class Options:
        """Options of NeFL.

        Attributes:
            scaling: What is smaller in a submodel.
            shares: The submodels' shares of the model's parameters; default: found from bytes.
            published: Take the submodels of the paper.
            widths: Or name them: the ratio of channels of each.
            blocks: The numbers of the blocks that each keeps, counted from 0.
            steps: Step sizes that learn, are 1, or make up for missing blocks, fixed or learning.
            apart: What is kept once for each submodel: "norms", "steps", or patterns of names.
            reach: How many places below its largest submodel a device may draw one; 0: none.
            assign: Whether submodels must fit a device's bytes; or, to reproduce the paper, go by
                the rank of its ratio, with draws above it as well.
        """

        scaling: submodels.Scaling = "both"
        shares: tuple[float, ...] = ()
        published: bool = False
        widths: tuple[float, ...] = ()
        blocks: tuple[tuple[int, ...], ...] = ()
        steps: Literal["learn", "fixed", "absorb", "absorb_learn"] = "learn"
        apart: tuple[str, ...] = ("norms", "steps")
        reach: int = 2
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
            if self.reach < 0:
                raise ConfigError(f"method.reach must not be negative, not {self.reach}")
            if self.steps == "absorb_learn" and "steps" not in self.apart:
                raise ConfigError(
                    "with method.steps = 'absorb_learn' step sizes start elsewhere in each "
                    "submodel; add 'steps' to method.apart"
                )

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self.ignores_budgets = self.options.assign == "ratio"

    # ---- the model

    @cached_property
    def parts(self) -> Anatomy:
        """Stem, blocks and head of the model."""
        return self.task.anatomy(self._example)

    @cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of a sample after the stem and after each block."""
        return hidden_shapes(copy.deepcopy(self._example).eval(), self.parts, self.task.image)

    @cached_property
    def channels(self) -> Channels:
        """What hangs together in the server's model."""
        return trace(self._example, torch.empty((2, *self.task.image), device="meta"))

    def build(self, piece: Piece) -> nn.Module:
        """Build a submodel from a fresh full model."""
        return self._taken(self.task.build(), piece)

    def _taken(self, model: nn.Module, piece: Piece, check: bool = True) -> nn.Module:
        """Turn a full model into a submodel: cut it, drop blocks, add step sizes."""
        kept, steps = self._kept(piece), self.options.steps
        if kept:
            model = cutting.shrink(model, self.channels, kept, check=check)
        blocks = piece.cut.get("blocks", range(len(self.parts.blocks)))
        drop_blocks(model, self.parts, self.shapes, blocks)
        if steps == "fixed":
            return model
        return add_step_sizes(
            model, self.parts, blocks, absorb="absorb" in steps, learns="learn" in steps
        )

    @cached_property
    def _example(self) -> nn.Module:
        """A full model that is never changed."""
        return self.task.build()

    def _sketch(self, cut: Mapping[str, Any]) -> nn.Module:
        """Return a submodel without data, to learn its cost from."""
        return self._taken(on_meta(self._example), Piece(cut=cut), check=False)

    def _kept(self, piece: Piece) -> Kept:
        width = piece.cut.get("width", 1.0)
        return {} if width == 1 else indices.keep(self.channels, width)

    def view(self, piece: Piece) -> View:
        """Return where a submodel's tensors live: in the full ones, or in its own."""
        if piece.size not in self._views:
            module, kept = self.module(piece), self._kept(piece)
            slots = cutting.view(self.channels, kept) if kept else {}
            own = {name: slots.get(name, Slot(name)) for name in own_tensors(module)}
            self._views[piece.size] = norms.separate(own, self.apart(module), piece.size)
        return self._views[piece.size]

    def apart(self, module: nn.Module) -> set[str]:
        """Return the names of the tensors of a submodel that are its own."""
        kinds = {"norms": norms.LAYERS, "steps": (StepSize,)}
        found = norms.kept_apart(module, self.task.recipe.norm)
        for word in self.options.apart:
            for name in own_tensors(module):
                holder = module.get_submodule(name.rpartition(".")[0])
                if isinstance(holder, kinds.get(word, ())) or fnmatch(name, word):
                    found.add(name)
        return found

    # ---- submodels

    def piece(self, number: int, submodel: Submodel) -> Piece:
        """Return a submodel as a piece; the whole model is the server's."""
        blocks = submodel.blocks
        if submodel.width == 1 and blocks is None:
            return self.main
        cut: dict[str, Any] = {"width": submodel.width}
        if blocks is not None:
            if not blocks or max(blocks) >= len(self.parts.blocks) or min(blocks) < 0:
                raise ConfigError(
                    f"a submodel keeps some of the model's blocks 0 to "
                    f"{len(self.parts.blocks) - 1}, not {list(blocks)}; see method.blocks"
                )
            cut["blocks"] = sorted(set(blocks))
        return Piece(f"{number + 1}: {self.share(cut):.3f} of the weights", cut)

    def share(self, cut: Mapping[str, Any]) -> float:
        """Return a submodel's share of the model's parameters: the paper's gamma."""
        part, whole = (sum(p.numel() for p in self._sketch(c).parameters()) for c in (cut, {}))
        return part / whole

    @cached_property
    def submodels(self) -> tuple[Piece, ...]:
        """All submodels, smallest first."""
        options = self.options
        layout = stages(self.shapes)
        shares = options.shares or (self.task.ratios if options.assign == "ratio" else ())
        if options.published:
            chosen = submodels.published(self.task.model.name, options.scaling)
        elif options.widths or options.blocks:
            pairs = zip_longest(options.widths, options.blocks)
            chosen = [Submodel(width or 1.0, blocks) for width, blocks in pairs]
        elif shares:
            chosen = [
                submodels.scaled(min(s, 1.0), options.scaling, layout) for s in sorted(shares)
            ]
        else:
            found = (self._fitting(memory, layout) for memory in self.task.budgets)
            chosen = [submodel for submodel in found if submodel]
        distinct = dict.fromkeys(chosen) or {Submodel(): None}
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
        module = self._sketch(self.piece(0, submodel).cut).requires_grad_()
        return self.predicted(module, self.stages(0)[0]).peak

    def _peak(self, piece: Piece) -> int:
        return self.footprint(piece, self.stages(0)[0]).peak

    # ---- the server

    def setup(self) -> State:
        """Return the full model, and for each submodel the tensors that are its own."""
        names = own_tensors(self.module(self.main))
        for pattern in set(self.options.apart) - {"norms", "steps"}:
            if not any(fnmatch(name, pattern) for name in names):
                raise ConfigError(
                    f"no tensor is called like {pattern!r}, one of method.apart; they have names "
                    f"such as {next(iter(names))!r}"
                )
        state = self.extended(super().setup(), self.submodels)
        table = [{"size": piece.size, "cut": dict(piece.cut)} for piece in self.submodels]
        return replace(state, extras={**state.extras, "submodels": table})

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Let a device draw one of the submodels within its reach."""
        pieces, reach = self.pieces(state), self.options.reach
        if self.options.assign == "ratio":
            # Tiers are equal parts of the fleet, which gives its ratios in ascending order.
            rank = self.task.ratios.index(ratio_of(device))
            top = rank * len(pieces) // len(self.task.ratios)
            drawn = pieces[max(top - reach, 0) : top + reach + 1]
        else:
            memory = device.memory
            fit = [n for n, p in enumerate(pieces) if memory is None or self._peak(p) <= memory]
            if not fit:
                least = min(map(self._peak, pieces))
                raise BudgetTooSmall(memory or 0, least, "one training step of any submodel")
            drawn = [pieces[number] for number in fit if number >= fit[-1] - reach]
        generator = rng.python_generator(self.task.seed, "submodel", round_index, device.id)
        stages = self.stages(round_index)
        chosen = generator.choice(drawn)
        return self.affordable(Plan(device.id, round_index, device.group, chosen, stages), device)

    def pieces(self, state: State) -> Sequence[Piece]:
        """Return all submodels; workers need not look for them again."""
        return [Piece(entry["size"], entry["cut"]) for entry in state.extras["submodels"]]
