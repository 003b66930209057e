"""FlexLoRA: devices of any rank; the server averages full products and takes them apart again.

Bai, Chen, Qian, Yao, Li: "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks
and Client Resources", NeurIPS 2024 (https://arxiv.org/abs/2402.11505).

    device k:  A_k, B_k of rank r_k <- local training of W + s B A
    server:    U S V^T <- SVD of sum_k n_k B_k A_k / sum_k n_k
               B <- U S, A <- V^T; a device of rank r gets the first r columns and rows

The first r singular directions are the best approximation of rank r (Eckart and Young). The server
keeps as many as the largest rank in the fleet.

Discloses: the trained adapters and head of each device, to the server.
"""

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from sizewise.exchange.merging import Merging
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors
from sizewise.families.lora.adapters import DOWN, UP, product
from sizewise.families.lora.method import LowRank
from sizewise.families.lora.products import Pair, PairMerging, factors


class FlexLoRA(LowRank):
    """Products averaged, then the best approximation of each rank."""

    plain_server = True

    def merging(self, state: State) -> Merging:
        """Return what averages products."""
        return Products(state.tensors)


class Products(PairMerging):
    """Sums full products, of the size of the layers that they adapt, however many devices come."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = defaultdict(float)

    def take(self, adapters: Mapping[str, Pair], weight: float) -> None:
        """Add the products of one update."""
        for layer, (down, up) in adapters.items():
            change = product(down, up).mul_(weight)
            self._sums[layer] = self._sums[layer].add_(change) if layer in self._sums else change
            self._weights[layer] += weight

    def merged(self, layer: str) -> dict[str, Tensor]:
        """Return the best factors of the mean product."""
        down, up = self._tensors[layer + DOWN], self._tensors[layer + UP]
        best = factors(self._sums[layer] / self._weights[layer], len(down))
        return {layer + DOWN: best[0].reshape(down.shape), layer + UP: best[1].reshape(up.shape)}
