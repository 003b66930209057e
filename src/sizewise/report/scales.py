"""Axes: round numbers, and units that people read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """From values, low to high, to pixels, start to stop."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.stop - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return some round values from low to high, both covered: a step of 1, 2 or 5 times 10^n."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def rounds(last: int, about: int) -> list[float]:
    """Return round numbers of rounds to mark, up to the last one."""
    return [value for value in inside(ticks(0, last, about), last) if value == int(value)]


def inside(values: Sequence[float], high: float) -> list[float]:
    """Return the ticks up to a value, for an axis that ends where the data ends."""
    return [value for value in values if value <= high * (1 + 1e-9)]


_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_FLOPS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("FLOP", 1.0))
_TIME = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
_UNITS = {"sent": _BYTES, "flops": _FLOPS, "seconds": _TIME, "device_seconds": _TIME}


def unit(cost: str, high: float) -> tuple[str, float]:
    """Return the unit in which values of a cost up to this one read best, and its size."""
    units = _UNITS.get(cost, (("", 1.0),))
    return next((u for u in units if high >= 1.5 * u[1]), units[-1])


def amount(cost: str, value: float) -> str:
    """Return a value of a cost with its unit, or with the word for it."""
    name, size = unit(cost, value)
    return f"{number(float(f'{value / size:.3g}'))} {name}" if name else f"{cost} {number(value)}"


def number(value: float) -> str:
    """Return a number on an axis."""
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"


def percent(value: float) -> str:
    """Return a share as percent on an axis."""
    return f"{100 * value:.3g} %"
