"""Scores against what they cost, and the training loss: a line for each method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from sizewise.report import line_chart, scales
from sizewise.report.chart import Chart
from sizewise.report.line_chart import Axes, Curve
from sizewise.report.records import COSTS, Run, by_row


@dataclass(frozen=True)
class Measure:
    """What curves show: its key in a run's history and its name in data, and how it is written."""

    key: str
    column: str
    on_axis: Callable[[float], str]
    exactly: Callable[[float], str]
    highest: float = float("inf")


SCORE = Measure("accuracy", "accuracy", scales.percent, lambda value: f"{value:.1%}", 1.0)
LOSS = Measure("train_loss", "loss", scales.number, lambda value: f"{value:.3g}")


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart of the scores for each cost that some run knows."""
    metric = runs[0].metric.capitalize()
    known = {key for run in runs for point in run.points for key in point.costs}
    return [
        _chart(
            runs,
            SCORE,
            cost,
            f"accuracy-{cost.replace('_', '-')}",
            f"{metric} against {words}",
            f"{metric} of the main deployed model on the test set, against {words}.",
        )
        for cost, words in COSTS.items()
        if cost in known
    ]


def loss(runs: Sequence[Run]) -> Chart | None:
    """Return a chart of what devices minimised; None if no run knows."""
    if not any(run.measured(LOSS.key) for run in runs):
        return None
    note = (
        "Mean loss of the devices' training steps, weighted by samples, round by round. It is what "
        "a method minimises, which may hold terms of its own, on what its devices train: it tells "
        "whether a method learns, not which one is better."
    )
    return _chart(runs, LOSS, "round", "training-loss", "Training loss", note)


def _chart(
    runs: Sequence[Run], measure: Measure, cost: str, name: str, title: str, note: str
) -> Chart:
    rows = by_row(runs)
    curves = [c for row, some in rows.items() if (c := curve(row, some, cost, measure.key))]
    seeds = max(len(some) for some in rows.values())
    if seeds > 1:
        note += f" Lines are means of {seeds} seeds, bands reach from the lowest to the highest."
    data = [
        {"row": run.row, "seed": run.seed, cost: point.costs[cost], measure.column: point.value}
        for run in runs
        for point in run.measured(measure.key)
        if cost in point.costs
    ]
    axes = Axes(title, cost, COSTS[cost], measure.on_axis, measure.exactly, measure.highest)
    return Chart(name, title, note, data, lambda width: line_chart.draw(curves, axes, width))


def curve(name: str, runs: Sequence[Run], cost: str, key: str = SCORE.key) -> Curve | None:
    """Return the curve of a method; None if no run has both."""
    points = [[p for p in run.measured(key) if cost in p.costs] for run in runs]
    points = [some for some in points if some]
    if not points:
        return None
    columns = list(zip(*points, strict=False))  # up to the shortest
    values = [[point.value for point in column] for column in columns]
    return Curve(
        name,
        tuple(fmean(point.costs[cost] for point in column) for column in columns),
        tuple(map(fmean, values)),
        tuple(map(min, values)),
        tuple(map(max, values)),
    )
