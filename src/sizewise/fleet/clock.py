"""A simulated clock: how long a device would take for its own FLOPs and its own bytes.

    seconds = bytes down / bandwidth + FLOPs / speed + bytes up / bandwidth

A round lasts as long as its slowest device; with `fleet.deadline`, at most so long, and what comes
later is not merged. Nothing here looks at a real clock: the same config gives the same seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sizewise.errors import UpdateRefused
from sizewise.fleet.devices import Device


@dataclass(frozen=True)
class Clock:
    """The rule by which rounds end: after so many seconds; None waits for the slowest device."""

    deadline: float | None = None

    def check(self, seconds: float | None) -> None:
        """Raise UpdateRefused if an update that took so long comes after the end of its round."""
        if seconds is not None and self.deadline is not None and seconds > self.deadline:
            raise UpdateRefused(
                f"it would have taken {seconds:,.3g} s, and the round ended after "
                f"{self.deadline:,.3g} s; raise fleet.deadline, or give it less to do"
            )

    def round(self, seconds: Iterable[float | None]) -> float | None:
        """Return how long a round lasts, given what its devices take; None if that is unknown."""
        known = [value for value in seconds if value is not None]
        if not known:
            return None
        return max(known) if self.deadline is None else min(max(known), self.deadline)


def seconds(device: Device, bytes_down: int, flops: int, bytes_up: int) -> float | None:
    """Return how long a device takes for a round; None if neither of its rates is known.

    A rate that is not known costs no time.
    """
    if device.speed is None and device.bandwidth is None:
        return None
    work = flops / device.speed if device.speed else 0.0
    sent = (bytes_down + bytes_up) / device.bandwidth if device.bandwidth else 0.0
    return work + sent
