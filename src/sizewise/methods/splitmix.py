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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sizewise.common import rng
from sizewise.common.widths import named
from sizewise.errors import ConfigError, NoChannelLeft
from sizewise.exchange.plan import Plan, Submodel, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, TensorSlice, View
from sizewise.families.base import Method
from sizewise.families.options import AssignedOptions
from sizewise.families.submodels import Submodels
from sizewise.fleet.devices import Device, ratio_of
from sizewise.memory.packing import largest_fitting
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


@dataclass(frozen=True)
class Bases(Submodel):
    """The bases of these numbers, ascending, and their width ratio."""

    numbers: tuple[int, ...]
    width: float

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{len(self.numbers)} of width {named(self.width)}"

    @property
    def shape_key(self) -> "Bases":
        """All sets of so many bases have the same shapes."""
        return first_bases(len(self.numbers), self.width)


def first_bases(count: int, width: float) -> Bases:
    """Return the first so many bases."""
    return Bases(tuple(range(count)), width)


def deck_of(atom: float) -> int:
    """Return the number of bases; with a hair more, as 1 / (1 / 49) is 48.99999999999999."""
    return int(1 / atom + 1e-9)


@dataclass(frozen=True)
class Deck:
    """What the server notes: the width ratio of a base."""

    atom: float


class Decks(Submodels):
    """Ensembles of narrow networks, rescaled as `SplitMix.Options` says."""

    def __init__(self, task: Task, rescale_init: bool, rescale_layer: bool) -> None:
        super().__init__(task)
        self.rescale_init, self.rescale_layer = rescale_init, rescale_layer

    def build(self, submodel: Any) -> nn.Module:
        """Build some bases, each with its own initialisation."""
        width, networks = submodel.width, []
        for draw in submodel.numbers:
            network = self.task.build(width, draw)
            if self.rescale_init and width < 1:
                with rng.seeded(self.task.seed, "base", draw):
                    draw_as_if_wide(network, width)
            networks.append(scale(network, width, "conv" if self.rescale_layer else "none"))
        return Ensemble(networks)

    def slices(self, submodel: Any) -> View:
        """Return where tensors live: the n-th base here is the server's base of that number."""
        places = {}
        for name in own_tensors(self.module(submodel)):
            _, number, rest = name.split(".", 2)
            places[name] = TensorSlice(f"bases.{submodel.numbers[int(number)]}.{rest}")
        return places


class SplitMix(Method):
    """A deck of narrow networks."""

    submodel_type: type[Bases] = Bases

    @dataclass(frozen=True)
    class Options(AssignedOptions):
        """Options of SplitMix.

        Attributes:
            atom: Width ratio of a base; default: the largest 1/n, n up to 16, that the smallest
                budget can train, or the smallest that the model can be built at.
            rescale_init: Draw weights and biases as if layers had full width.
            rescale_layer: Divide the outputs of convolutions and hidden linear layers by `atom` in
                training.
            mask_labels: Ignore classes that are not in a batch.
        """

        atom: float | None = None
        rescale_init: bool = True
        rescale_layer: bool = True
        mask_labels: bool = False

        def __post_init__(self) -> None:
            if self.atom is not None and not 0 < self.atom <= 1:
                raise ConfigError(f"method.atom must be in (0, 1], not {self.atom}")

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        if self.options.mask_labels:
            task.has_classes("method.mask_labels")
            self.divides_batches = False  # Which classes count depends on the whole batch.
        if task.model.weights is not None:
            raise ConfigError(
                "splitmix trains several narrow networks, which cannot all start from "
                "model.weights; leave it out, and give a built model as a class or function"
            )

    @cached_property
    def submodels(self) -> Decks:
        """Ensembles of bases."""
        return Decks(self.task, self.options.rescale_init, self.options.rescale_layer)

    # ---- the deck

    @cached_property
    def atom(self) -> float:
        """The width ratio of a base."""
        if self.options.atom is not None:
            return self.options.atom

        def bytes_of(parts: int) -> float:
            try:
                return self.levers.least(Bases((0,), 1 / parts))
            except NoChannelLeft:
                return -1  # As if it fitted: then the one before it is the narrowest there is.

        choices = range(LARGEST_DECK, 0, -1)
        parts = largest_fitting(choices, bytes_of, self.task.budgets[0]) or LARGEST_DECK
        return 1 / (parts if self.task.budgets[0] is None or bytes_of(parts) >= 0 else parts - 1)

    @cached_property
    def main(self) -> Bases:
        """All bases."""
        return first_bases(deck_of(self.atom), self.atom)

    def quota(self, device: Device) -> int:
        """Return how many bases a device trains; at least one, which may be refused."""
        deck = deck_of(self.atom)
        if self.options.assign == "ratio":
            return max(1, min(deck, int(ratio_of(device) / self.atom + 1e-9)))
        choices = [first_bases(count, self.atom) for count in range(1, deck + 1)]
        found = largest_fitting(choices, self.levers.least, device.memory)
        return 1 if found is None else len(found.numbers)

    def setup(self) -> State:
        """Return all bases, and their width: workers need not look for it again."""
        return super().setup().noting(Deck(self.atom))

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Deal a device the next card of the deck, and others at random."""
        cards = list(range(deck_of(self.atom)))
        cycle, position = divmod(device.turn, len(cards))
        rng.python_generator(self.task.seed, "deck", cycle).shuffle(cards)
        card = cards.pop(position)
        generator = rng.python_generator(self.task.seed, "bases", round_index, device.id)
        chosen = [card, *generator.sample(sorted(cards), self.quota(device) - 1)]
        return self.offer(device, round_index, Bases(tuple(sorted(chosen)), self.atom))

    # ---- the device

    def loss(self, submodel: Any, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the losses of the bases, one after the other."""
        single = masked_cross_entropy if self.options.mask_labels else cross_entropy

        def each(module: nn.Module, images: Tensor, labels: Tensor) -> Iterator[Tensor]:
            for base in module.bases:  # type: ignore[union-attr]
                yield single(base, images, labels)

        return each

    def train(self, plan: Plan, tensors: Tensors, shard: Shard, device_state: Tensors) -> Update:
        """Train; the loss to report is that of one base, in the mean."""
        update = super().train(plan, tensors, shard, device_state)
        held: Any = plan.submodel
        return replace(update, loss=update.loss / len(held.numbers))

    # ---- what people run

    def sizes(self, state: State) -> Sequence[Submodel]:
        """Return ensembles of the first 1, 2, 4, ... bases, and of all of them."""
        atom = state.facts(Deck).atom
        deck = deck_of(atom)
        counts = [2**power for power in range(deck.bit_length()) if 2**power < deck]
        return [first_bases(count, atom) for count in (*counts, deck)]

    def size_of(self, plan: Plan) -> Submodel:
        """Return the largest ensemble that is no larger than what a device trains."""
        trained: Any = plan.submodel
        count, deck = len(trained.numbers), deck_of(trained.width)
        fitting = count if count == deck else 2 ** (count.bit_length() - 1)
        return first_bases(fitting, trained.width)


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
