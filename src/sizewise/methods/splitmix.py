"""SplitMix: many narrow networks; a device trains some of them, and runs as many as it likes.

Hong, Wang, Wang, Zhou: "Efficient Split-Mix Federated Learning for On-Demand and In-Situ
Customization", ICLR 2022 (https://arxiv.org/abs/2203.09747).

    state:     N = int(1 / atom) independent base networks of width ratio `atom`
    device k:  takes the next card of a shuffled deck of bases, and n_k - 1 others at random;
               each batch: forward and backward through its bases in turn, then one step
    server:    each base <- sum n_k w_k / sum n_k   over the devices that trained it; others stay
    run:       the mean of the logits of the first n bases, for any n

Bases are never coupled, so a device that trains n of them holds n networks but the activations of
one. That is why bytes allow many more bases than the paper's quota of int(r_k / atom), which
`assign = "ratio"` gives. Widths are rounded down. `rescale_init` draws weights and biases as if a
layer had full width; `rescale_layer` divides the outputs of convolutions, and of linear layers but
the last, by `atom` in training. `mask_labels` sets the logits of classes that are not in a batch to
0.

Discloses: the trained weights of each device, to the server.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sizewise.common import rng
from sizewise.common.widths import named
from sizewise.errors import ConfigError, NoChannelLeft
from sizewise.exchange.plan import Submodel, Plan, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import TensorSlice, Tensors, View
from sizewise.families.base import Method
from sizewise.fleet.devices import Device, ratio_of
from sizewise.steps.step import Loss, cross_entropy, masked_cross_entropy
from sizewise.surgery.scaling import scale
from sizewise.training.loop import Shard, own_tensors
from sizewise.training.task import Task

LARGEST_DECK = 16


class Ensemble(nn.Module):
    """Independent networks; its logits are the mean of theirs."""

    def __init__(self, bases: Sequence[nn.Module]) -> None:
        super().__init__()
        self.bases = nn.ModuleList(bases)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean logits (B, classes)."""
        total: Tensor = self.bases[0](x)
        for base in self.bases[1:]:
            total = total + base(x)
        return total / len(self.bases)


class SplitMix(Method):
    """A deck of narrow networks."""

    @dataclass(frozen=True)
    class Options:
        """Options of SplitMix.

        Attributes:
            atom: Width ratio of a base; default: the largest 1/n, n up to 16, that the smallest
                budget can train, or the smallest that the model can be built at.
            assign: Whether a device trains as many bases as its bytes hold, or int(ratio / atom).
            rescale_init: Draw weights and biases as if layers had full width.
            rescale_layer: Divide the outputs of convolutions and hidden linear layers by `atom` in
                training.
            mask_labels: Ignore classes that are not in a batch.
        """

        atom: float | None = None
        assign: Literal["bytes", "ratio"] = "bytes"
        rescale_init: bool = True
        rescale_layer: bool = True
        mask_labels: bool = False

        def __post_init__(self) -> None:
            if self.atom is not None and not 0 < self.atom <= 1:
                raise ConfigError(f"method.atom must be in (0, 1], not {self.atom}")

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        self.ignores_budgets = self.options.assign == "ratio"
        if self.options.mask_labels:
            task.has_classes("method.mask_labels")
        if task.model.weights is not None:
            raise ConfigError(
                "splitmix trains several narrow networks, which cannot all start from "
                "model.weights; leave it out"
            )

    # ---- the deck

    @cached_property
    def atom(self) -> float:
        """The width ratio of a base."""
        if self.options.atom is not None:
            return float(self.options.atom)
        smallest = self.task.budgets[0]
        for parts in range(1, LARGEST_DECK + 1):
            try:
                peak = self.footprint(self.bases([0], 1 / parts), self.stages(0)[0]).peak
            except NoChannelLeft:
                return 1 / (parts - 1)
            if smallest is None or peak <= smallest:
                break
        return 1 / parts

    @property
    def deck(self) -> int:
        """The number of bases; a hair more than 1 / atom, as 1 / (1 / 49) is 48.99999999999999."""
        return int(1 / self.atom + 1e-9)

    def bases(self, chosen: Sequence[int], atom: float | None = None) -> Submodel:
        """Return the piece that consists of these bases."""
        width = self.atom if atom is None else atom
        size = f"{len(chosen)} of width {named(width)}"
        return Submodel(size, {"bases": list(chosen), "width": width})

    @cached_property
    def main(self) -> Submodel:
        """All bases."""
        return self.bases(range(self.deck))

    def quota(self, device: Device) -> int:
        """Return how many bases a device trains."""
        if self.options.assign == "ratio":
            return max(1, min(self.deck, int(ratio_of(device) / self.atom + 1e-9)))
        (stage,) = self.stages(0)
        low, high = 1, self.deck
        while device.memory is not None and low < high:
            # The largest first: more often than not, they all fit.
            middle = high if (low, high) == (1, self.deck) else (low + high + 1) // 2
            if self.footprint(self.bases(range(middle)), stage).peak <= device.memory:
                low = middle
            else:
                high = middle - 1
        return low if device.memory is not None else high

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Deal a device the next card of the deck, and others at random."""
        cycle, position = divmod(device.turn, self.deck)
        cards = list(range(self.deck))
        rng.python_generator(self.task.seed, "deck", cycle).shuffle(cards)
        card = cards.pop(position)
        generator = rng.python_generator(self.task.seed, "bases", round_index, device.id)
        chosen = [card, *generator.sample(sorted(cards), self.quota(device) - 1)]
        piece = self.bases(sorted(chosen))
        plan = Plan(device.id, round_index, device.group, piece, self.stages(round_index))
        return self.affordable(plan, device)

    # ---- pieces

    def build(self, piece: Submodel) -> nn.Module:
        """Build the bases of a piece, each with its own initialisation."""
        width = piece.cut["width"]
        networks = [self.task.build(width, draw) for draw in piece.cut["bases"]]
        for draw, network in zip(piece.cut["bases"], networks, strict=True):
            if self.options.rescale_init and width < 1:
                with rng.seeded(self.task.seed, "base", draw):
                    draw_as_if_wide(network, width)
            scale(network, width, "conv" if self.options.rescale_layer else "none")
        return Ensemble(networks)

    def view(self, piece: Submodel) -> View:
        """Return a piece's tensors: its n-th base is the server's base of that number."""
        tensors = own_tensors(self.module(piece))
        slots = {}
        for name in tensors:
            _, number, rest = name.split(".", 2)
            slots[name] = TensorSlice(f"bases.{piece.cut['bases'][int(number)]}.{rest}")
        return slots

    def setup(self) -> State:
        """Return all bases, and their width: workers need not look for it again."""
        state = super().setup()
        return replace(state, extras={**state.extras, "atom": self.atom})

    # ---- the device

    def objective(self, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the losses of the bases, one after the other."""
        single = masked_cross_entropy if self.options.mask_labels else cross_entropy

        def each(module: nn.Module, images: Tensor, labels: Tensor) -> Iterator[Tensor]:
            for base in module.bases:  # type: ignore[union-attr]
                yield single(base, images, labels)

        return each

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, memory: Tensors) -> Update:
        """Train; the loss to report is that of one base, in the mean."""
        update = super().train(plan, tensors, shard, memory)
        return replace(update, loss=update.loss / len(plan.piece.cut["bases"]))

    # ---- what people run

    def pieces(self, state: State) -> Sequence[Submodel]:
        """Return ensembles of the first 1, 2, 4, ... bases, and of all of them."""
        atom = state.extras["atom"]
        deck = int(1 / atom + 1e-9)
        counts = [2**power for power in range(deck.bit_length()) if 2**power < deck]
        return [self.bases(range(count), atom) for count in (*counts, deck)]


@torch.no_grad()
def draw_as_if_wide(network: nn.Module, width: float) -> None:
    """Draw weights and biases but the first layer's again, in the range they have at full width.

    Biases that the model starts at 0 stay there.
    """
    layers = [x for x in network.modules() if isinstance(x, _ConvNd | nn.Linear)]
    for layer in layers[1:]:
        bound = (width / layer.weight[0].numel()) ** 0.5
        layer.weight.uniform_(-bound, bound)
        if layer.bias is not None and layer.bias.any():
            layer.bias.uniform_(-bound, bound)
