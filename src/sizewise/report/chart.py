"""A chart: a headline, how to read it, its data, and a drawing for every width of page."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sizewise.report.drawing import SERIES, Drawing, Line, Text, words_width
from sizewise.report.scales import Scale

T = TypeVar("T")

WIDE, NARROW = 760.0, 360.0
"""Widths of drawings, in pixels: on a desk, and on a phone."""


@dataclass(frozen=True)
class Chart:
    """A figure of a report: its files' name, what it is about, and how to read it.

    Its data are rows of equal keys; it is drawn for a width in pixels.
    """

    name: str
    title: str
    note: str
    data: Sequence[Mapping[str, Any]]
    draw: Callable[[float], Drawing]

    def csv(self) -> str:
        """Return its data as comma-separated values."""
        out = io.StringIO()
        heads = list(dict.fromkeys(key for row in self.data for key in row))
        writer = csv.DictWriter(out, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.data)
        return out.getvalue()


def series(number: int) -> tuple[str, tuple[float, ...]]:
    """Return colour and dashes of a line; after eight the colours begin again."""
    dashes: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2))
    return f"s{number % SERIES}", dashes[number // SERIES % len(dashes)]


def lanes(
    drawing: Drawing, rows: Mapping[str, Iterable[T]], y: float, step: float
) -> Iterator[tuple[str, str, T, float]]:
    """Write the name of each method, and yield for each line below it: name, colour, what, y."""
    for number, (name, some) in enumerate(rows.items()):
        colour, _ = series(number)
        y += 24
        drawing.add(Text(0, y - 8, name, colour, 13, bold=True))
        for one in some:
            yield name, colour, one, y
            y += step


def legend(drawing: Drawing, names: Sequence[str], left: float, top: float, right: float) -> float:
    """Draw a key of lines, in as many rows as it takes; return where it ends."""
    x, y = left, top
    for number, name in enumerate(names):
        width = 24 + words_width(name) + 14
        if x > left and x + width > right:
            x, y = left, y + 18
        colour, dash = series(number)
        drawing.add(Line(((x, y - 4), (x + 18, y - 4)), colour, 2.5, dash))
        drawing.add(Text(x + 24, y, name))
        x += width
    return y + 8


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near the wanted ones, in the same order, at least a gap from each other."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [wanted[i] for i in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    if places and places[-1] > high:
        places[-1] = high
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    moved = [0.0] * len(wanted)
    for i, place in zip(order, places, strict=True):
        moved[i] = max(place, low)
    return moved


def grid_x(
    drawing: Drawing, scale: Scale, marks: Mapping[float, str], top: float, bottom: float
) -> None:
    """Draw upright grid lines with their numbers below."""
    for value, words in marks.items():
        x = scale(value)
        drawing.add(Line(((x, top), (x, bottom)), "rule"))
        drawing.add(Text(x, bottom + 16, words, "muted", 11, "middle"))
