"""Accuracy against what it cost: a line for each method, a band over its seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sizewise.report import scales
from sizewise.report.chart import NARROW, Chart, apart, legend, series
from sizewise.report.drawing import Area, Dot, Drawing, Line, Text, shortened, words_width
from sizewise.report.records import COSTS, Run, by_row
from sizewise.report.scales import Scale


@dataclass(frozen=True)
class Curve:
    """A method's evaluations: means over its seeds, cut to the shortest of them."""

    name: str
    costs: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart for each cost that some run knows."""
    known = {key for run in runs for point in run.points for key in point.costs}
    return [_chart(runs, cost) for cost in COSTS if cost in known]


def _chart(runs: Sequence[Run], cost: str) -> Chart:
    curves = [c for name, some in by_row(runs).items() if (c := curve(name, some, cost))]
    seeds = max(len(some) for some in by_row(runs).values())
    metric = runs[0].metric.capitalize()
    note = f"{metric} of the main deployed model on the test set, against {COSTS[cost]}."
    if seeds > 1:
        note += f" Lines are means of {seeds} seeds, bands reach from the lowest to the highest."
    data: list[Mapping[str, Any]] = [
        {"row": run.row, "seed": run.seed, cost: point.costs[cost], "accuracy": point.accuracy}
        for run in runs
        for point in run.points
        if cost in point.costs
    ]
    return Chart(
        f"accuracy-{cost.replace('_', '-')}",
        f"{metric} against {COSTS[cost]}",
        note,
        data,
        lambda width: _draw(curves, cost, width),
    )


def curve(name: str, runs: Sequence[Run], cost: str) -> Curve | None:
    """Return the curve of a method; None if no run has both."""
    points = [[p for p in run.points if cost in p.costs] for run in runs]
    points = [some for some in points if some]
    if not points:
        return None
    columns = list(zip(*points, strict=False))  # up to the shortest
    scores = [[point.accuracy for point in column] for column in columns]
    return Curve(
        name,
        tuple(fmean(point.costs[cost] for point in column) for column in columns),
        tuple(map(fmean, scores)),
        tuple(map(min, scores)),
        tuple(map(max, scores)),
    )


def _draw(curves: Sequence[Curve], cost: str, width: float) -> Drawing:
    narrow = width <= NARROW
    height = 300.0 if narrow else 400.0
    names = [one.name for one in curves]
    drawing = Drawing(width, height, f"Accuracy against {COSTS[cost]} of {', '.join(names)}")
    label = 0.0 if narrow else min(150.0, max(words_width(name) for name in names) + 54)
    left, right, bottom = 42.0, width - label - 8, height - 40
    top = 14.0
    if narrow and len(curves) > 1:
        top = legend(drawing, names, 0, 14, width) + 12
    marks = scales.ticks(min(min(c.low) for c in curves), max(max(c.high) for c in curves), 5)
    marks = [mark for mark in marks if mark <= 1]
    y = Scale(marks[0], max(marks[-1], max(max(c.high) for c in curves)), bottom, top)
    highest = max(max(c.costs) for c in curves)
    name, size = scales.unit(cost, highest)
    lowest = 0.0 if cost != "round" or highest > 1 else 0.5
    x = Scale(lowest, highest / size, left, right)
    for mark in marks:
        drawing.add(Line(((left, y(mark)), (right, y(mark))), "rule"))
        drawing.add(Text(left - 6, y(mark) + 4, scales.percent(mark), "muted", 11, "end"))
    about = 4 if narrow else 7
    below = scales.inside(scales.ticks(0, highest / size, about), highest / size)
    if cost == "round":
        below = scales.rounds(int(highest), about)
    for mark in (mark for mark in below if mark >= lowest):
        drawing.add(Text(x(mark), bottom + 18, scales.number(mark), "muted", 11, "middle"))
    axis = f"{COSTS[cost]}{f', {name}' if name else ''}"
    drawing.add(Text(right, height - 5, axis, "muted", 11, "end"))
    places = apart([y(c.mean[-1]) for c in curves], 15, top, bottom)
    for number, one in enumerate(curves):
        colour, dash = series(number)
        xs = [x(value / size) for value in one.costs]
        if one.low != one.high:
            outline = [*zip(xs, map(y, one.high), strict=True)]
            outline += reversed([*zip(xs, map(y, one.low), strict=True)])
            drawing.add(Area(tuple(outline), colour))
        drawing.add(Line(tuple(zip(xs, map(y, one.mean), strict=True)), colour, 2.2, dash))
        final = one.mean[-1]
        drawing.add(Dot(xs[-1], y(final), 3.2, colour, title=f"{one.name}: {final:.1%}"))
        if not narrow:
            if xs[-1] < right - 20:  # A dotted line leads to the name.
                ends = ((xs[-1] + 5, y(final)), (right + 4, places[number] - 4))
                drawing.add(Line(ends, "rule", 1, (2, 3)))
            words = f"{shortened(one.name, label - 50)} {100 * final:.1f}"
            drawing.add(Text(right + 8, places[number] + 1, words, colour, 12.5, bold=True))
    return drawing
