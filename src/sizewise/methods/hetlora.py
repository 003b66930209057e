"""HetLoRA: ranks by bytes, cut off on the way down, padded on the way up, pruned if too large.

Cho, Liu, Xu, Fahrezi, Joshi: "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
Models", EMNLP 2024 (https://arxiv.org/abs/2401.06432).

    device k:  gets the first r_k rows of A and columns of B, and minimises
               loss + penalty sum |B[:, q:]| |A[q:]|,  q = floor(keep r_k)
    server:    p_k <- |B_k A_k| / sum_j |B_j A_j|       (Frobenius, over all adapters of a device)
               A <- sum_k p_k A_k,   B <- sum_k p_k B_k,  rows and columns that k lacks being 0
               r_k <- q if |B_k[:, q:] A_k[q:]| is smaller than when the round began

Zeros count: entries of a high rank are diluted by devices that do not have them. A device's rank
never grows again; `keep = 1` does without pruning.

Discloses: the trained adapters and head of each device, to the server.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.errors import ConfigError
from sizewise.exchange.merging import Merging
from sizewise.exchange.plan import Plan, TrainingStage, Update, observed
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, cut
from sizewise.families.lora.adapters import DOWN, UP, Rank, adapted, pairs, product
from sizewise.families.lora.method import LowRank
from sizewise.families.lora.products import Pair, PairMerging
from sizewise.fleet.devices import Device
from sizewise.steps.step import Loss, cross_entropy
from sizewise.training.loop import Shard


@dataclass(frozen=True)
class Pruned:
    """What the server notes: the rank of each device that was pruned, by its number."""

    ranks: Mapping[str, int]


class HetLoRA(LowRank):
    """Padded factors, weighted by the norms of their products, with ranks that shrink."""

    @dataclass(frozen=True)
    class Options(LowRank.Options):
        """Options of HetLoRA.

        Attributes:
            keep: Share of its rank that a device keeps when it is pruned (gamma); 1: no pruning.
            penalty: Weight of the term that makes the rest of it small (lambda).
        """

        keep: float = 0.99
        penalty: float = 5e-4

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 < self.keep <= 1:
                raise ConfigError(f"method.keep must be in (0, 1], not {self.keep}")
            if not 0 <= self.penalty < math.inf:
                raise ConfigError(f"method.penalty must not be negative, not {self.penalty}")

    options: Options

    def kept(self, rank: int) -> int:
        """Return the rank that is left of one when it is pruned."""
        return rank if self.options.keep == 1 else max(1, math.floor(self.options.keep * rank))

    def setup(self) -> State:
        """Return the adapters as they are drawn; nobody is pruned yet."""
        return super().setup().noting(Pruned({}))

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device the rank that it holds, or what pruning has left of it."""
        found = self.largest(None if self.options.ignores_budgets else device.memory)
        left = state.facts(Pruned).ranks.get(str(device.id), found.rank)
        return self.offer(device, round_index, replace(found, rank=min(found.rank, left)))

    def loss(self, submodel: Rank, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the loss, and what the last rows and columns of adapters cost beside it."""
        start = self.kept(submodel.rank)
        if start == submodel.rank or not self.options.penalty:
            return cross_entropy
        return partial(_penalised, start=start, penalty=self.options.penalty)

    def merging(self, state: State) -> Merging:
        """Return what adds up padded factors."""
        return Padded(state.tensors)

    def merge(self, state: State, updates: Iterable[Update]) -> State:
        """Return the next state, and who was pruned."""
        ranks = dict(state.facts(Pruned).ranks)

        def look(update: Update) -> None:
            rank = update.plan.submodel.rank  # type: ignore[attr-defined]
            start = self.kept(rank)
            sent = cut(state.tensors, self.submodels.view(update.plan.submodel))
            if start < rank and _tail(update.tensors, start) < _tail(sent, start):
                ranks[str(update.plan.device)] = start

        return super().merge(state, observed(updates, look)).noting(Pruned(ranks))


def _penalised(
    module: nn.Module, inputs: Any, targets: Tensor, *, start: int, penalty: float
) -> Tensor:
    """Return the loss and the norms of what is left of adapters from a rank on."""
    value = cross_entropy(module, inputs, targets)
    for layer in adapted(module).values():
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        value = value + penalty * _norm(down[start:]) * _norm(up[:, start:])
    return value


def _norm(tensor: Tensor) -> Tensor:
    # At zero, where every B begins, the root has no slope.
    return (tensor.square().sum() + torch.finfo(tensor.dtype).tiny).sqrt()


def _tail(tensors: Tensors, start: int) -> float:
    """Return the norm of what adapters add from a rank on."""
    squares = (product(a[start:], b[:, start:]).square().sum() for _, a, b in pairs(tensors))
    return math.sqrt(math.fsum(map(float, squares)))


class Padded(PairMerging):
    """Sums factors padded with zeros, by the norms of their products."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}

    def take(self, adapters: Mapping[str, Pair], weight: float) -> None:
        """Add the adapters of one update."""
        squares = (float(product(*pair).square().sum()) for pair in adapters.values())
        norm = math.sqrt(math.fsum(squares))
        for layer, (down, up) in adapters.items():
            for name, factor in ((layer + DOWN, down), (layer + UP, up)):
                if name not in self._sums:
                    self._sums[name] = torch.zeros_like(self._tensors[name])
                place = self._sums[name][: len(factor), : factor.shape[1]]
                place.add_(factor, alpha=norm)
            self._weights[layer] = self._weights.get(layer, 0.0) + norm

    def merged(self, layer: str) -> dict[str, Tensor]:
        """Return the weighted means; as they were if no device has learned anything."""
        names, weight = (layer + DOWN, layer + UP), self._weights[layer]
        return {n: self._sums[n] / weight if weight else self._tensors[n] for n in names}
