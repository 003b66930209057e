"""Lines with bands, and the values of all of them wherever the pointer is."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sizewise.report import scales
from sizewise.report.chart import NARROW, apart, legend, series
from sizewise.report.drawing import (
    Area,
    Box,
    Dot,
    Drawing,
    Hover,
    Line,
    Shape,
    Text,
    shortened,
    words_width,
)
from sizewise.report.scales import Scale

STOPS, TIPS = 40, 400
"""Places at which values are shown, at most, and lines in all of them: a page stays small."""


@dataclass(frozen=True)
class Curve:
    """What a method came to, by what it had cost: means over its seeds, cut to the shortest."""

    name: str
    costs: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Axes:
    """What a chart is about, its cost by key and in words, and how values are written.

    `highest` is the largest value that there can be: no mark is drawn above it.
    """

    title: str
    cost: str
    words: str
    on_axis: Callable[[float], str]
    exactly: Callable[[float], str]
    highest: float


def draw(curves: Sequence[Curve], axes: Axes, width: float) -> Drawing:
    """Return the chart; names stand at the ends of lines, on a phone in a key above them."""
    narrow = width <= NARROW
    height = 300.0 if narrow else 400.0
    names = [one.name for one in curves]
    drawing = Drawing(width, height, f"{axes.title} of {', '.join(names)}")
    label = 0.0 if narrow else min(210.0, 8 + max(_wide(_ending(one, axes)) for one in curves))
    left, right, bottom = 42.0, width - label - 8, height - 40
    top = 14.0
    if narrow and len(curves) > 1:
        top = legend(drawing, names, 0, 14, width) + 12
    marks = scales.ticks(min(min(c.low) for c in curves), max(max(c.high) for c in curves), 5)
    marks = [mark for mark in marks if mark <= axes.highest]
    y = Scale(marks[0], max(marks[-1], max(max(c.high) for c in curves)), bottom, top)
    highest = max(max(c.costs) for c in curves)
    unit, size = scales.unit(axes.cost, highest)
    lowest = 0.0 if axes.cost != "round" or highest > 1 else 0.5
    x = Scale(lowest * size, highest, left, right)
    for mark in marks:
        drawing.add(Line(((left, y(mark)), (right, y(mark))), "rule"))
        drawing.add(Text(left - 6, y(mark) + 4, axes.on_axis(mark), "muted", 11, "end"))
    about = 4 if narrow else 7
    below = scales.inside(scales.ticks(0, highest / size, about), highest / size)
    if axes.cost == "round":
        below = scales.rounds(int(highest), about)
    for mark in (mark for mark in below if mark >= lowest):
        drawing.add(Text(x(mark * size), bottom + 18, scales.number(mark), "muted", 11, "middle"))
    words = f"{axes.words}{f', {unit}' if unit else ''}"
    drawing.add(Text(right, height - 5, words, "muted", 11, "end"))
    for number, one in enumerate(curves):
        drawing.add(*_line(one, number, axes, x, y))
    if not narrow:
        places = apart([y(c.mean[-1]) for c in curves], 15, top, bottom)
        for number, (one, place) in enumerate(zip(curves, places, strict=True)):
            drawing.add(*_name(one, number, axes, x, y, place))
    drawing.add(*_hovers(curves, axes, x, y))
    return drawing


def _line(one: Curve, number: int, axes: Axes, x: Scale, y: Scale) -> Iterator[Shape]:
    colour, dash = series(number)
    xs = [*map(x, one.costs)]
    if one.low != one.high:
        outline = [*zip(xs, map(y, one.high), strict=True)]
        outline += reversed([*zip(xs, map(y, one.low), strict=True)])
        yield Area(tuple(outline), colour)
    yield Line(tuple(zip(xs, map(y, one.mean), strict=True)), colour, 2.2, dash)
    title = f"{one.name}: {axes.exactly(one.mean[-1])}"
    yield Dot(xs[-1], y(one.mean[-1]), 3.2, colour, title=title)


def _ending(one: Curve, axes: Axes) -> str:
    """Return a line's name, cut to its room, and its last value."""
    return f"{shortened(one.name, 130)} {axes.exactly(one.mean[-1]).removesuffix('%')}"


def _wide(words: str) -> float:
    return words_width(words, 14.6)  # Bold letters of 12.5 are as wide as these.


def _name(one: Curve, number: int, axes: Axes, x: Scale, y: Scale, place: float) -> Iterator[Shape]:
    """Yield a line's name and its last value, right of the chart."""
    end = x(one.costs[-1])
    if end < x.stop - 20:  # A dotted line leads to the name.
        yield Line(((end + 5, y(one.mean[-1])), (x.stop + 4, place - 4)), "rule", 1, (2, 3))
    yield Text(x.stop + 8, place + 1, _ending(one, axes), series(number)[0], 12.5, bold=True)


def _hovers(curves: Sequence[Curve], axes: Axes, x: Scale, y: Scale) -> Iterator[Hover]:
    """Yield the values of all curves, for as many places as can be told apart."""
    stops = _stops(curves, max(10, min(STOPS, TIPS // len(curves))), x)
    edges = [x.start, *((x(a) + x(b)) / 2 for a, b in pairwise(stops)), x.stop]
    for stop, (left, right) in zip(stops, pairwise(edges), strict=True):
        tip = tuple(_tip(curves, axes, stop, x, y))
        yield Hover(left, y.stop, right - left, y.start - y.stop, tip)


def _stops(curves: Sequence[Curve], most: int, x: Scale) -> list[float]:
    """Return costs at which something was measured, evenly thinned; the last one is among them."""
    found = sorted({cost for one in curves for cost in one.costs})
    gap = (x.stop - x.start) / most
    kept = found[-1:]
    for cost in reversed(found[:-1]):
        if x(kept[-1]) - x(cost) >= gap:
            kept.append(cost)
    return kept[::-1]


def _tip(curves: Sequence[Curve], axes: Axes, stop: float, x: Scale, y: Scale) -> Iterator[Shape]:
    """Yield a line at a cost, and a box: what each method had reached by then, best first."""
    reached = []
    for number, one in enumerate(curves):
        place = bisect_right(one.costs, stop) - 1
        if place >= 0:
            reached.append((one.mean[place], number, one.costs[place]))
    reached.sort(reverse=True)
    lines = [(scales.amount(axes.cost, stop), "muted")]
    for value, number, _ in reached:
        lines.append((f"{axes.exactly(value)}  {curves[number].name}", series(number)[0]))
    width = max(_wide(words) for words, _ in lines) + 14
    at = x(stop)
    left = at + 10 if at + 10 + width <= x.stop else max(at - 10 - width, 0.0)
    height, middle = 17.0 * len(lines) + 9, (y.start + y.stop) / 2
    high = sum(y(value) < middle for value, _, _ in reached) * 2 > len(reached)
    top = y.start - 6 - height if high else y.stop + 4  # Where there are fewer lines to cover.
    yield Line(((at, y.start), (at, y.stop)), "muted")
    for value, number, cost in reached:
        yield Dot(x(cost), y(value), 4, series(number)[0])
    yield Box(left, top, width, height, "paper", 0.94)
    yield Box(left, top, width, height, "muted", 1.0, fill=False)
    for place, (words, colour) in enumerate(lines):
        yield Text(left + 9, top + 17 * (place + 1), words, colour, bold=place > 0)
