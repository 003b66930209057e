"""Faults that a user can turn on, to see what a round policy makes of them.

What happens to a message is a function of the seed, the device and how many messages it got, so a
run with faults can be repeated, but for the time that machines take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sizewise.common.rng import python_generator
from sizewise.common.structure import build
from sizewise.errors import ConfigError

KINDS = ("die", "lose", "late", "duplicate", "cut", "clock")
"""What may happen to a message; `Faults` says how often."""


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong; shares of the messages that ask for training.

    Attributes:
        die: The node dies in the middle of its work, and comes back under another id.
        lose: The reply is lost.
        late: The reply comes `seconds` later.
        seconds: How much later.
        duplicate: The reply comes twice.
        cut: For `seconds` afterwards no node reaches the SuperLink, as while it restarts.
        clock: The node's clock has jumped ahead when it makes the reply.
        jump: By how many seconds.
        shuffle: Every reply waits for a random time of at most so many seconds: they are reordered.
        seed: Of all the draws.
    """

    die: float = 0.0
    lose: float = 0.0
    late: float = 0.0
    seconds: float = 30.0
    duplicate: float = 0.0
    cut: float = 0.0
    clock: float = 0.0
    jump: float = 3600.0
    shuffle: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        shares = [getattr(self, kind) for kind in KINDS]
        if min(shares) < 0 or sum(shares) > 1 or min(self.seconds, self.shuffle) < 0:
            raise ConfigError(
                f"faults are shares of messages, of at most 1 in all, and seconds, not {self}"
            )

    def draw(self, device: int, number: int) -> "Fate":
        """Return what happens to a device's message, given how many came before it."""
        generator = python_generator(self.seed, "faults", device, number)
        drawn, delay = generator.random(), generator.random() * self.shuffle
        for kind in KINDS:
            drawn -= getattr(self, kind)
            if drawn < 0:
                return Fate(kind, delay + self.seconds * (kind == "late"))
        return Fate("", delay)


@dataclass(frozen=True)
class Fate:
    """What happens to a message: the name of a share of `Faults`, "" for none, and a delay."""

    kind: str
    delay: float


def read_faults(values: Mapping[str, Any]) -> Faults:
    """Return faults by their names; raise ConfigError if they are no faults."""
    return build(Faults, values, "--faults")
