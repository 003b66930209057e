"""FLoRA: factors are stacked, not averaged, and become part of the base: no noise from averaging.

Wang, Shen, He, Sun, Wang, Lyu, Li: "FLoRA: Federated Fine-Tuning Large Language Models with
Heterogeneous Low-Rank Adaptations", NeurIPS 2024 (https://arxiv.org/abs/2409.05976).

    device k:  draws A, sets B = 0; A_k, B_k of rank r_k <- local training of W + s B A
    server:    stacks [p_1 B_1, p_2 B_2, ...] and [A_1; A_2; ...],  p_k = n_k / sum n
    everybody: W <- W + s (sum_k p_k B_k A_k), the product of the stacks

The product of stacks is the exact mean of what devices learned, whatever their ranks. Here devices
remember nothing, so each gets the stacks of all rounds so far. They are as long as the ranks of all
that was merged; once that is more than a layer has inputs or outputs, they are made shorter by a
singular value decomposition that leaves nothing out.

Discloses: the trained adapters and head of each device, to the server; the stacks of all devices,
to every device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.errors import ConfigError
from sizewise.exchange.merging import Merging
from sizewise.exchange.plan import Submodel, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, View, whole
from sizewise.families.lora.adapters import DOWN, UP, Rank, as_change, product
from sizewise.families.lora.method import LowRank
from sizewise.families.lora.products import Pair, PairMerging, factors
from sizewise.families.lora.submodels import AdapterSubmodels
from sizewise.training.task import Task
from sizewise.training.working import WorkingCopy

STACKED_DOWN, STACKED_UP = ".stacked_A", ".stacked_B"
"""How the names of what was merged end."""


@dataclass(frozen=True)
class Rounds:
    """What the server notes: how often new adapters were drawn."""

    drawn: int


class FLoRA(LowRank):
    """Stacked adapters, merged into the base."""

    plain_server = True

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        if self.options.base != "float32":
            raise ConfigError(
                f"flora merges what was learned into the base, and method.base = "
                f"{self.options.base!r} would round it away; use 'float32', or another method"
            )

    @cached_property
    def submodels(self) -> "Stacking":
        """Adapters around a base that takes up what was learned."""
        return Stacking(self.task, self.options)

    def setup(self) -> State:
        """Return the adapters as they are drawn, and empty stacks."""
        return super().setup().noting(Rounds(0))

    def merging(self, state: State) -> Merging:
        """Return what stacks factors."""
        return Stacks(state.tensors)

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state, with longer stacks and newly drawn adapters."""
        merged = super().merge(state, updates)
        draw = state.facts(Rounds).drawn + 1
        drawn = {
            name: self.submodels.drawn(name, tensor.shape, draw)
            for name, tensor in merged.tensors.items()
            if name.endswith(DOWN)
        }
        return replace(merged, tensors={**merged.tensors, **drawn}).noting(Rounds(draw))

    def sizes(self, state: State) -> Sequence[Rank]:
        """Return the one model there is: after merging, all ranks are the same base."""
        return super().sizes(state)[-1:]


class Stacking(AdapterSubmodels):
    """Submodels whose base takes up the stacks."""

    @cached_property
    def stacks(self) -> dict[str, Tensor]:
        """The stacks before the first round: of A (0, inputs), of B (outputs, 0)."""
        found: dict[str, Tensor] = {}
        for layer in self.places.targets(0):
            change = as_change(self.base.get_submodule(layer))
            found |= {layer + STACKED_DOWN: change[:0], layer + STACKED_UP: change[:, :0]}
        return {name: torch.empty(tensor.shape) for name, tensor in found.items()}

    def extended(self, state: State, submodels: Iterable[Submodel]) -> State:
        """Return a state that also has the stacks, and tensors which only these submodels have."""
        return super().extended(replace(state, tensors={**self.stacks, **state.tensors}), submodels)

    def slices(self, submodel: Rank) -> View:
        """Return where a submodel's tensors live, and the stacks of all layers."""
        return {**super().slices(submodel), **whole(list(self.stacks))}

    def working(self, module: nn.Module) -> WorkingCopy:
        """Return a working copy that merges stacks when it is loaded."""
        return _Merged(module, self)


class _Merged(WorkingCopy):
    """A working copy with weights of its own where others share the base's: stacks go into them."""

    def __init__(self, module: nn.Module, submodels: Stacking) -> None:
        held, base, layers = submodels.held(module), submodels.base, submodels.places.targets(0)
        self._scale = submodels.settings.scale
        self._origins = {layer: as_change(base.get_submodule(layer)) for layer in layers}
        for layer in layers:
            inner = _inner(module, layer)
            inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
        super().__init__(module, torch.device(submodels.task.device), held)

    @torch.no_grad()
    def load(self, tensors: Tensors) -> nn.Module:
        """Fill the model, and merge the stacks into its base."""
        module = super().load(tensors)
        for layer, origin in self._origins.items():
            change = product(tensors[layer + STACKED_DOWN], tensors[layer + STACKED_UP])
            as_change(_inner(module, layer)).copy_(origin + self._scale * change)
        return module


def _inner(module: nn.Module, layer: str) -> Any:
    """Return the frozen layer of this name, whether or not it has an adapter."""
    found: Any = module.get_submodule(layer)
    return getattr(found, "base_layer", found)


class Stacks(PairMerging):
    """Stacks the factors of a round behind those of the rounds before."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self._parts: dict[str, list[Pair]] = {}
        self._weights: dict[str, float] = {}

    def take(self, adapters: Mapping[str, Pair], weight: float) -> None:
        """Stack the adapters of one update."""
        for layer, (down, up) in adapters.items():
            self._parts.setdefault(layer, []).append((down.flatten(1), weight * up.flatten(1)))
            self._weights[layer] = self._weights.get(layer, 0.0) + weight

    def merged(self, layer: str) -> dict[str, Tensor]:
        """Return the longer stacks of a layer, and a B of zeros to begin the next round with."""
        parts, weight = self._parts[layer], self._weights[layer]
        names = layer + STACKED_DOWN, layer + STACKED_UP
        down = torch.cat([self._tensors[names[0]], *(a for a, _ in parts)])
        up = torch.cat([self._tensors[names[1]], *(b / weight for _, b in parts)], 1)
        most = min(down.shape[1], len(up))
        if len(down) > most:
            down, up = factors(product(down, up), most)
        return {
            **dict(zip(names, (down, up), strict=True)),
            layer + UP: torch.zeros_like(self._tensors[layer + UP]),
        }
