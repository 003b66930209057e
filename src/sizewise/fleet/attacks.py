"""What simulated attackers send in place of what they trained.

With r what a device received, d how it really changed it, and s the attack's `strength`:

    sign-flip         r - s d
    scaling           r + s d
    noise             r + s z, z normal, as large as d: by tensor, in the root mean square
    label-flip        r + d, trained on the labels in reverse: y becomes classes - 1 - y
    little-is-enough  r + mean - s deviation, of the honest devices' changes, entry by entry: Baruch
                      et al. 2019 (https://arxiv.org/abs/1902.06156)
    inner-product     r - s mean, likewise: Xie et al. 2019 (https://arxiv.org/abs/1903.03936)
    outer             r - s d where no honest device of the round holds an entry, elsewhere r + d:
                      what a lone large device does to the channels that only it has
    lie               r + d, but with more samples or bytes than it has

The last but one and the two before it know what all honest devices send in a round: the worst case.
Where no honest device holds an entry, its mean change and deviation are 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from sizewise.errors import ConfigError
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.view import Tensors, TensorSlice, View

Kind = Literal[
    "sign-flip",
    "scaling",
    "noise",
    "label-flip",
    "little-is-enough",
    "inner-product",
    "outer",
    "lie",
]

STRENGTHS: Mapping[str, float] = {
    "sign-flip": 1.0,
    "scaling": 10.0,
    "noise": 10.0,
    "little-is-enough": 1.5,
    "inner-product": 2.0,
    "outer": 10.0,
}
"""What `strength` is if nobody says; those of the published attacks are ByzFL's."""


@dataclass(frozen=True)
class AttackConfig:
    """Devices that attack, in simulation: `[[fleet.attack]]`.

    Attributes:
        kind: What they send; see docs/robustness.md.
        share: Their share of the fleet, or of `group`; the run's seed draws them. Default: 0.2.
        count: Or how many they are.
        group: The device class that they are drawn from; default: all.
        strength: How hard they push; default: 1 for `sign-flip`, 1.5 for `little-is-enough`, 2 for
            `inner-product`, 10 for `scaling`, `noise` and `outer`.
        samples: They claim to have so many times the samples that they have.
        claims: They claim to be of this device class, and get the piece that its bytes hold.
    """

    kind: Kind
    share: float | None = None
    count: int | None = None
    group: str | None = None
    strength: float | None = None
    samples: float = 1.0
    claims: str | None = None

    def __post_init__(self) -> None:
        if self.share is not None and self.count is not None:
            raise ConfigError("give only one of fleet.attack.share and fleet.attack.count")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"fleet.attack.share must be above 0 and at most 1, not {self.share}")
        if self.count is not None and self.count < 1:
            raise ConfigError(f"fleet.attack.count must be at least 1, not {self.count}")
        for name in ("samples", "strength"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"fleet.attack.{name} must be a positive number, not {value}")
        if self.kind == "lie" and self.samples == 1 and self.claims is None:
            raise ConfigError(
                "fleet.attack.kind = 'lie' needs to know about what: give fleet.attack.samples, "
                "such as 10, or fleet.attack.claims, a device class"
            )
        if self.strength is not None and self.kind not in STRENGTHS:
            raise ConfigError(
                f"fleet.attack.strength says nothing to the kind {self.kind!r}; leave it out"
            )

    @property
    def push(self) -> float:
        """The strength, or what it is for this kind."""
        return STRENGTHS.get(self.kind, 1.0) if self.strength is None else self.strength


def refuse_attackers(attacks: Sequence[AttackConfig]) -> None:
    """Raise ConfigError if there are any; for runs whose devices are machines of their own."""
    if attacks:
        raise ConfigError(
            "fleet.attack is for simulated devices, and machines of their own are never made to "
            "attack; leave it out, or run in one process"
        )


class Crowd:
    """What the honest devices of a round send, entry by entry over those that hold it."""

    def __init__(self, tensors: Tensors) -> None:
        still = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in tensors.items()}
        self._tensors = tensors
        self._changes, self._squares = CoverageMean(still), CoverageMean(still)

    def add(self, update: Tensors, view: View) -> None:
        """Take an honest update: trained tensors by local name, and where they live."""
        changes = {
            local: tensor.double() - view[local].read(self._tensors).double()
            for local, tensor in update.items()
            if tensor.is_floating_point()
        }
        self._changes.add(changes, view, 1.0)
        self._squares.add({local: change.square() for local, change in changes.items()}, view, 1.0)

    @cached_property
    def mean(self) -> Tensors:
        """The mean change of every entry of the server's tensors, float64."""
        return self._changes.result()

    @cached_property
    def deviation(self) -> Tensors:
        """The standard deviation of every entry's changes, float64."""
        squares = self._squares.result()
        return {
            n: (squares[n] - mean.square()).clamp(min=0).sqrt() for n, mean in self.mean.items()
        }

    def holds(self, place: TensorSlice) -> Tensor:
        """Return which entries of a place some honest device holds."""
        held, shape = self._changes.covered(place.name), self._tensors[place.name].shape
        mask = held if isinstance(held, Tensor) else torch.full(shape, held)
        return TensorSlice(place.name, place.index).read({place.name: mask})


def sent(
    attack: AttackConfig,
    update: Tensors,
    view: View,
    tensors: Tensors,
    crowd: Crowd,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return what an attacker sends.

    Args:
        attack: What it does.
        update: What it trained, by local name.
        view: Where that lives.
        tensors: The server's tensors, as it received them.
        crowd: What the honest devices send.
        generator: Where its noise comes from.
    """
    return {
        local: _sent(attack, tensor, view[local], tensors, crowd, generator)
        if tensor.is_floating_point()
        else tensor
        for local, tensor in update.items()
    }


def _sent(
    attack: AttackConfig,
    trained: Tensor,
    place: TensorSlice,
    tensors: Tensors,
    crowd: Crowd,
    generator: torch.Generator,
) -> Tensor:
    received = place.read(tensors)
    change, push = trained - received, attack.push
    match attack.kind:
        case "sign-flip":
            return received - push * change
        case "scaling":
            return received + push * change
        case "noise":
            size = push * change.square().mean().sqrt()
            return received + size * torch.randn(change.shape, generator=generator)
        case "little-is-enough":
            moved = place.read(crowd.mean) - push * place.read(crowd.deviation)
            return (received + moved).to(trained.dtype)
        case "inner-product":
            return (received - push * place.read(crowd.mean)).to(trained.dtype)
        case "outer":
            return torch.where(crowd.holds(place), trained, received - push * change)
    return trained
