"""Kinds of devices for the simulated clock: how fast each computes and sends.

Speeds are a quarter of the arithmetic peak in single precision: cores x clock x operations a cycle,
or the maker's figure. The quarter is our assumption of what training small networks reaches, and
the same for all, so that devices compare. Links are nominal rates of the kind of network named,
not measurements. Use your own `speed` and `bandwidth` where you know better.
"""

from dataclasses import dataclass

REACHED = 0.25
"""The share of its arithmetic peak that a device is taken to reach in training."""

_MBIT = 1e6 / 8


@dataclass(frozen=True)
class Profile:
    """A kind of device.

    Attributes:
        description: What it is, and where its figures come from.
        peak: Single-precision FLOP per second at most.
        bandwidth: Bytes per second, each way.
    """

    description: str
    peak: float
    bandwidth: float

    @property
    def speed(self) -> float:
        """FLOP per second that training is taken to reach."""
        return REACHED * self.peak


PROFILES = {
    "pi-zero-2w": Profile(
        "Raspberry Pi Zero 2 W: 4 Cortex-A53 at 1.0 GHz, 8 operations a cycle; 20 Mbit/s Wi-Fi",
        4 * 1.0e9 * 8,
        20 * _MBIT,
    ),
    "pi-4": Profile(
        "Raspberry Pi 4B: 4 Cortex-A72 at 1.5 GHz, 8 operations a cycle; 100 Mbit/s Ethernet",
        4 * 1.5e9 * 8,
        100 * _MBIT,
    ),
    "pi-5": Profile(
        "Raspberry Pi 5: 4 Cortex-A76 at 2.4 GHz, 16 operations a cycle; 100 Mbit/s Wi-Fi",
        4 * 2.4e9 * 16,
        100 * _MBIT,
    ),
    "jetson-nano": Profile(
        "NVIDIA Jetson Nano: 472 GFLOP/s in half precision by its data sheet, half of that in "
        "single; 1 Gbit/s Ethernet",
        236e9,
        1000 * _MBIT,
    ),
    "desktop": Profile(
        "Desktop: 8 cores at 4 GHz with two 256-bit multiply-add units, 32 operations a cycle; "
        "1 Gbit/s Ethernet",
        8 * 4.0e9 * 32,
        1000 * _MBIT,
    ),
}
