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
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from sizewise.common import rng
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Submodel, Plan
from sizewise.exchange.state import State
from sizewise.families.scalewise import Scalewise
from sizewise.fleet.devices import Device, ratio_of
from sizewise.surgery import norms
from sizewise.surgery.step_sizes import StepSize, add_step_sizes
from sizewise.training.loop import own_tensors


class NeFL(Scalewise):
    """Submodels in width and depth."""

    recipe_defaults: ClassVar[Mapping[str, Any]] = {"norm": "tracked", "weighting": "equal"}

    @dataclass(frozen=True)
    class Options(Scalewise.Options):
        """Options of NeFL.

        Attributes:
            steps: Step sizes that learn, are 1, or make up for missing blocks, fixed or learning.
            apart: What is kept once for each submodel: "norms", "steps", or patterns of names.
            reach: How many places below its largest submodel a device may draw one; 0: none.
                With `assign = "ratio"`, as in the paper, also above.
        """

        steps: Literal["learn", "fixed", "absorb", "absorb_learn"] = "learn"
        apart: tuple[str, ...] = ("norms", "steps")
        reach: int = 2

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.reach < 0:
                raise ConfigError(f"method.reach must not be negative, not {self.reach}")
            if self.steps == "absorb_learn" and "steps" not in self.apart:
                raise ConfigError(
                    "with method.steps = 'absorb_learn' step sizes start elsewhere in each "
                    "submodel; add 'steps' to method.apart"
                )

    # ---- submodels

    def reduced(self, model: nn.Module, piece: Submodel, check: bool = True) -> nn.Module:
        """Turn a full model into a submodel, with step sizes."""
        model, steps = super().reduced(model, piece, check), self.options.steps
        if steps == "fixed":
            return model
        return add_step_sizes(
            model,
            self.parts,
            self.kept_blocks(piece),
            absorb="absorb" in steps,
            learns="learn" in steps,
        )

    def apart(self, module: nn.Module) -> set[str]:
        """Return the names of the inconsistent tensors of a submodel."""
        kinds = {"norms": norms.LAYERS, "steps": (StepSize,)}
        found = super().apart(module)
        for word in self.options.apart:
            for name in own_tensors(module):
                holder = module.get_submodule(name.rpartition(".")[0])
                if isinstance(holder, kinds.get(word, ())) or fnmatch(name, word):
                    found.add(name)
        return found

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
        state = replace(state, tensors={**state.tensors, **self._given()})
        table = [{"size": piece.size, "cut": dict(piece.cut)} for piece in self.submodels]
        return replace(state, extras={**state.extras, "submodels": table})

    def _given(self) -> dict[str, Tensor]:
        """Return the pre-trained start of what submodels have of their own; norms start fresh."""
        given, found = self.task.pretrained(), {}
        others = [piece for piece in self.submodels if given and piece != self.main]
        for piece in others:
            module, shared = self.module(piece), self._shared(piece)
            for local, slot in self.view(piece).items():
                is_norm = isinstance(module.get_submodule(local.rpartition(".")[0]), norms.LAYERS)
                if "@" in slot.name and shared[local].name in given and not is_norm:
                    found[slot.name] = shared[local].read(given).clone()
        return found

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Let a device draw one of the submodels within its reach."""
        generator = rng.python_generator(self.task.seed, "submodel", round_index, device.id)
        drawn = generator.choice(self.within_reach(state, device))
        return self._planned(drawn, device, round_index)

    def most(self, state: State, device: Device, round_index: int) -> Plan:
        """Return the plan for the largest submodel within a device's reach."""
        return self._planned(self.within_reach(state, device)[-1], device, round_index)

    def _planned(self, piece: Submodel, device: Device, round_index: int) -> Plan:
        stages = self.stages(round_index)
        return self.affordable(Plan(device.id, round_index, device.group, piece, stages), device)

    def within_reach(self, state: State, device: Device) -> Sequence[Submodel]:
        """Return the submodels that a device may train, smallest first."""
        pieces, reach = self.pieces(state), self.options.reach
        if self.options.assign == "ratio":
            # Tiers are equal parts of the fleet, which gives its ratios in ascending order.
            rank = self.task.ratios.index(ratio_of(device))
            top = -(-(rank + 1) * len(pieces) // len(self.task.ratios)) - 1
            return pieces[max(top - reach, 0) : top + reach + 1]
        memory = device.memory
        fit = [n for n, piece in enumerate(pieces) if memory is None or self.peak(piece) <= memory]
        if not fit:
            least = min(map(self.peak, pieces)) if self.least is None else self.least
            raise BudgetTooSmall(memory or 0, least, "one training step of any submodel")
        return [pieces[number] for number in fit if number >= fit[-1] - reach]

    def pieces(self, state: State) -> Sequence[Submodel]:
        """Return all submodels; workers need not look for them again."""
        return [Submodel(entry["size"], entry["cut"]) for entry in state.extras["submodels"]]
