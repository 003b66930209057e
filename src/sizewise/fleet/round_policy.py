"""The round policy: for whom a server waits, and for how long."""

from dataclasses import dataclass

from sizewise.errors import ConfigError


@dataclass(frozen=True)
class RoundPolicy:
    """The `[engine.flower]` table.

    Over-selection is a `fleet.per_round` above `enough`: ask 13 devices, go on with the first 10.

    Attributes:
        deadline: Seconds that the devices of a round have; who is later is not merged.
        minimum: Updates without which a round does not count. It is then done again.
        enough: Updates that end a round before its deadline; default: those of all devices asked.
        attempts: How often in a row a round may fail for want of updates before the run stops.
        nodes: Devices that must be connected before the first round; default: the whole fleet.
        wait: Seconds to wait for them.
        keys: A folder of public keys, `3.pub` for device 3; a node with another key is refused.
    """

    deadline: float = 3600.0
    minimum: int = 1
    enough: int | None = None
    attempts: int = 3
    nodes: int | None = None
    wait: float = 300.0
    keys: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.deadline < float("inf") or not 0 <= self.wait < float("inf"):
            raise ConfigError(
                f"engine.flower.deadline and wait are seconds, not {self.deadline} and {self.wait}"
            )
        if self.minimum < 1 or self.attempts < 1 or (self.nodes is not None and self.nodes < 1):
            raise ConfigError("engine.flower.minimum, attempts and nodes must be at least 1")
        if self.enough is not None and self.enough < self.minimum:
            raise ConfigError(
                f"engine.flower.enough is {self.enough}, below the minimum of {self.minimum}; "
                f"raise it, or lower engine.flower.minimum"
            )
