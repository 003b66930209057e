"""Accuracy of every deployed size: what people with small devices get."""

from collections.abc import Sequence
from statistics import fmean

from sizewise.report import scales
from sizewise.report.chart import NARROW, Chart, grid_x, lanes
from sizewise.report.drawing import Dot, Drawing, Line, Text, shortened
from sizewise.report.records import Run, by_row
from sizewise.report.scales import Scale

SHOWN = 12
"""Sizes drawn for each method; the data has them all."""

Scores = dict[str, list[float]]
"""The accuracies of each size, by seed."""


def chart(runs: Sequence[Run]) -> Chart:
    """Return a dot for each size, method by method."""
    rows = {name: _scores(some) for name, some in by_row(runs).items()}
    data = [
        {"row": run.row, "seed": run.seed, "size": size, "accuracy": score}
        for run in runs
        for size, score in run.sizes.items()
    ]
    note = (
        f"Each line is a model that the method hands out, with its {runs[0].metric} on the test set"
    )
    several = any(len(some) > 1 for scores in rows.values() for some in scores.values())
    note += "; small rings are single seeds." if several else "."
    if any(len(scores) > SHOWN for scores in rows.values()):
        note += f" Of methods with more than {SHOWN} sizes the first ones are drawn."
    return Chart(
        "accuracy-by-size",
        f"{runs[0].metric.capitalize()} by deployed size",
        note,
        data,
        lambda width: _draw(rows, width),
    )


def _scores(runs: Sequence[Run]) -> Scores:
    names = dict.fromkeys(size for run in runs for size in run.sizes)
    return {size: [run.sizes[size] for run in runs if size in run.sizes] for size in names}


def _draw(rows: dict[str, Scores], width: float) -> Drawing:
    narrow = width <= NARROW
    left, right, step = (104.0 if narrow else 190.0), width - 52, 22.0
    shown = {name: list(scores.items())[:SHOWN] for name, scores in rows.items()}
    count = sum(map(len, shown.values()))
    height = 24 * len(shown) + step * count + 34
    drawing = Drawing(width, height, f"Accuracy by deployed size of {', '.join(rows)}")
    values = [value for scores in shown.values() for _, some in scores for value in some]
    marks = scales.ticks(min(values), max(values), 3 if narrow else 6)
    x = Scale(marks[0], marks[-1], left, right)
    grid_x(drawing, x, {mark: scales.percent(mark) for mark in marks}, 6, height - 26)
    for name, colour, (size, some), y in lanes(drawing, shown, 8, step):
        middle, mean = y + step / 2 - 4, fmean(some)
        drawing.add(Text(10, middle + 4, shortened(size, left - 20)))
        drawing.add(Line(((x(marks[0]), middle), (x(mean), middle)), colour, 1.2, (1, 3)))
        if len(some) > 1:
            drawing.add(*(Dot(x(v), middle, 3.2, colour, 0.8, fill=False) for v in some))
        drawing.add(Dot(x(mean), middle, 4.6, colour, title=f"{name}, {size}: {mean:.1%}"))
        drawing.add(Text(width, middle + 4, f"{100 * mean:.1f}", "ink", 12, "end"))
    return drawing
