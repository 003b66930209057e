"""NeFL: nested submodels, scaled in width and depth, that keep their norms and step sizes apart.

Kang, Cha, Shin, Lee, Kang: "NeFL: Nested Model Scaling for Federated Learning with System
Heterogeneous Clients" (https://arxiv.org/abs/2308.07761).

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import zip_longest
from typing import Any, ClassVar, Literal

from torch import Tensor

from sizewise.common import rng
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.kept_apart import is_own
from sizewise.exchange.plan import Plan
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.families.options import AssignedOptions
from sizewise.fleet.devices import Device, ratio_of
from sizewise.memory.packing import largest_fitting
from sizewise.methods.nefl.scaling import Scaled, Scaling, published, scaled
from sizewise.methods.nefl.submodels import KINDS, ScaledSubmodels
from sizewise.surgery import norms
from sizewise.surgery.dropping import stages
from sizewise.training.loop import own_tensors

SHARES = 32
"""Where submodels are found from bytes, their share of the parameters is one part in so many."""


@dataclass(frozen=True)
class Nest:
    """What the server notes: all submodels, smallest first. Workers need not look for them."""

    submodels: tuple[Scaled, ...]


class NeFL(Method):
    """Submodels in width and depth."""

    recipe_defaults: ClassVar[Mapping[str, Any]] = {"norm": "tracked", "weighting": "equal"}
    submodel_type: type[Scaled] = Scaled

    @dataclass(frozen=True)
    class Options(AssignedOptions):
        """Options of NeFL. By ratio, devices are divided into tiers by the rank of theirs.

        Attributes:
            scaling: What is smaller in a submodel.
            shares: The submodels' shares of the model's parameters; default: found from bytes.
            published: Take the submodels of the NeFL paper.
            widths: Or name them: the ratio of channels of each.
            blocks: The numbers of the blocks that each keeps, counted from 0.
            steps: Step sizes that learn, are 1, or make up for missing blocks, fixed or learning.
            apart: What is kept once for each submodel: "norms", "steps", or patterns of names.
            reach: How many places below its largest submodel a device may draw one; 0: none.
                With `assign = "ratio"`, as in the paper, also above.
        """

        scaling: Scaling = "both"
        shares: tuple[float, ...] = ()
        published: bool = False
        widths: tuple[float, ...] = ()
        blocks: tuple[tuple[int, ...], ...] = ()
        steps: Literal["learn", "fixed", "absorb", "absorb_learn"] = "learn"
        apart: tuple[str, ...] = ("norms", "steps")
        reach: int = 2

        def __post_init__(self) -> None:
            if sum(map(bool, (self.shares, self.published, self.listed))) > 1:
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

        @property
        def listed(self) -> bool:
            """Whether submodels are listed one by one."""
            return bool(self.widths or self.blocks)

    options: Options

    @cached_property
    def submodels(self) -> ScaledSubmodels:
        """Submodels in width and depth, with step sizes."""
        return ScaledSubmodels(self.task, self.options.steps, self.options.apart)

    # ---- which submodels there are

    @cached_property
    def nest(self) -> tuple[Scaled, ...]:
        """All submodels, smallest first."""
        options, layout = self.options, stages(self.task.hidden_shapes)
        shares = options.shares or (self.task.ratios if options.assign == "ratio" else ())
        if options.published:
            chosen = published(self.task.model.name, options.scaling)
        elif options.listed:
            pairs = zip_longest(options.widths, options.blocks)
            listed = (self._checked(Scaled(width or 1.0, blocks)) for width, blocks in pairs)
            chosen = sorted(listed, key=self.submodels.share)
        elif shares:
            capped = sorted(min(share, 1.0) for share in shares)
            chosen = [scaled(share, options.scaling, layout) for share in capped]
        else:
            parts = range(1, SHARES + 1)
            family = [scaled(part / SHARES, options.scaling, layout) for part in parts]
            budgets = self.task.budgets
            found = [largest_fitting(family, self._sketched, memory) for memory in budgets]
            # Where nobody can hold any, the smallest says what it would take.
            chosen = [one for one in found if one is not None] or family[:1]
        distinct = dict.fromkeys(map(self._checked, chosen))
        return tuple(self._labelled(number, one) for number, one in enumerate(distinct, 1))

    def _sketched(self, submodel: Scaled) -> int:
        """Return the bytes of training a submodel that need not be built."""
        if submodel not in self._peaks:
            sketch = self.submodels.sketch(self._checked(submodel))
            self._peaks[submodel] = self.levers.least_with(
                lambda stage: self.costs.of(sketch, submodel, stage).footprint.peak,
                self.task.stage(),
            )
        return self._peaks[submodel]

    @cached_property
    def _peaks(self) -> dict[Scaled, int]:
        """What submodels need that were looked at: a cache, never a result."""
        return {}

    def _checked(self, submodel: Scaled) -> Scaled:
        """Return a submodel with its blocks in order; raise ConfigError if it has other ones."""
        if submodel.blocks is None:
            return submodel
        blocks, count = tuple(sorted(set(submodel.blocks))), len(self.task.parts.blocks)
        if not blocks or blocks[0] < 0 or blocks[-1] >= count:
            raise ConfigError(
                f"a submodel keeps some of the model's blocks 0 to {count - 1}, not "
                f"{list(blocks)}; see method.blocks"
            )
        return replace(submodel, blocks=None if len(blocks) == count else blocks)

    def _labelled(self, number: int, submodel: Scaled) -> Scaled:
        """Return a submodel with a label that says its share; the whole model is the server's."""
        if submodel == self.main:
            return submodel
        share = self.submodels.share(submodel)
        return replace(submodel, label=f"submodel {number} ({share:.2f})")

    # ---- the server

    def trained(self) -> Sequence[Scaled]:
        """Return all submodels."""
        return self.nest

    def setup(self) -> State:
        """Return the full model, and for each submodel the tensors that are its own."""
        names = own_tensors(self.submodels.module(self.main))
        for pattern in set(self.options.apart) - KINDS.keys():
            if not any(fnmatch(name, pattern) for name in names):
                raise ConfigError(
                    f"no tensor is called like {pattern!r}, one of method.apart; they have names "
                    f"such as {next(iter(names))!r}"
                )
        state = super().setup()
        state = replace(state, tensors={**state.tensors, **self._given()})
        return state.noting(Nest(self.nest))

    def _given(self) -> dict[str, Tensor]:
        """Return the pre-trained start of what submodels have of their own; norms start fresh."""
        given, found = self.task.pretrained(), {}
        for submodel in (one for one in self.nest if given and one != self.main):
            module, shared = self.submodels.module(submodel), self.submodels.shared(submodel)
            for local, place in self.submodels.view(submodel).items():
                is_norm = isinstance(module.get_submodule(local.rpartition(".")[0]), norms.LAYERS)
                if is_own(place.name) and shared[local].name in given and not is_norm:
                    found[place.name] = shared[local].read(given).clone()
        return found

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Let a device draw one of the submodels within its reach."""
        generator = rng.python_generator(self.task.seed, "submodel", round_index, device.id)
        return self.offer(device, round_index, generator.choice(self.within_reach(state, device)))

    def plan_upper_bound(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the plan for the largest submodel within a device's reach."""
        return self.offer(device, round_index, self.within_reach(state, device)[-1])

    def within_reach(self, state: State, device: Device) -> Sequence[Scaled]:
        """Return the submodels that a device may train, smallest first."""
        nest, reach = self.sizes(state), self.options.reach
        if self.options.assign == "ratio":
            # Tiers are equal parts of the fleet, which gives its ratios in ascending order.
            rank = self.task.ratios.index(ratio_of(device))
            top = -(-(rank + 1) * len(nest) // len(self.task.ratios)) - 1
            return nest[max(top - reach, 0) : top + reach + 1]
        memory = device.memory
        fit = [
            n for n, one in enumerate(nest) if memory is None or self.levers.least(one) <= memory
        ]
        if not fit:
            what = "one training step of any submodel"
            raise BudgetTooSmall(memory or 0, self._least(nest), what)
        return [nest[number] for number in fit if number >= fit[-1] - reach]

    def _least(self, nest: Sequence[Scaled]) -> int:
        """Return the bytes of the smallest submodel that there could be."""
        options = self.options
        if options.published or options.listed or options.shares:
            return min(map(self.levers.least, nest))
        layout = stages(self.task.hidden_shapes)
        return self._sketched(scaled(1 / SHARES, options.scaling, layout))

    def sizes(self, state: State) -> Sequence[Scaled]:
        """Return all submodels."""
        return state.facts(Nest).submodels
