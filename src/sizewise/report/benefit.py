"""Who benefits: the accuracies of devices, class by class, each with the model that it runs."""

from collections.abc import Iterator, Sequence
from statistics import fmean, quantiles
from typing import Any

from sizewise.report import scales
from sizewise.report.chart import NARROW, Chart, grid_x, lanes
from sizewise.report.drawing import Box, Dot, Drawing, Line, Text, shortened
from sizewise.report.records import Run, by_row
from sizewise.report.scales import Scale

DEVICES = 60
"""Devices of a class that are drawn; the data has them all."""

Groups = dict[str, list[dict[str, Any]]]
"""What each class's devices get, over all seeds."""


def chart(runs: Sequence[Run]) -> Chart | None:
    """Return a line for each device class, method by method; None if no device validates."""
    rows = {name: _groups(some) for name, some in by_row(runs).items()}
    if not any(rows.values()):
        return None
    data = [{"row": run.row, "seed": run.seed, **served} for run in runs for served in run.served]
    return Chart(
        "devices",
        "Who benefits",
        "Accuracy of each device with the model that it runs, on samples of its own that nobody "
        "trained on, at the last evaluation. Ring: a device (of larger classes some); line: from "
        "the worst device of a class to the best; bar: the half in the middle; dot and number: the "
        "mean. Point at a ring to see whose it is.",
        data,
        lambda width: _draw(rows, width),
    )


def _groups(runs: Sequence[Run]) -> Groups:
    found: Groups = {}
    for served in (one for run in runs for one in run.served):
        found.setdefault(served["group"], []).append(served)
    return found


def _draw(rows: dict[str, Groups], width: float) -> Drawing:
    narrow = width <= NARROW
    left, right, step = (64.0 if narrow else 110.0), width - 52, 24.0
    height = 24 * len(rows) + step * sum(map(len, rows.values())) + 34
    drawing = Drawing(width, height, f"Accuracy of devices by class under {', '.join(rows)}")
    x = Scale(0, 1, left, right)
    marks = scales.ticks(0, 1, 3 if narrow else 6)
    grid_x(drawing, x, {mark: scales.percent(mark) for mark in marks}, 6, height - 26)
    shown = {name: groups.items() for name, groups in rows.items()}
    for name, colour, (group, devices), y in lanes(drawing, shown, 8, step):
        some = [served["accuracy"] for served in devices]
        middle, mean = y + step / 2 - 4, fmean(some)
        low, _, high = quantiles(some, n=4, method="inclusive") if len(some) > 1 else some * 3
        title = f"{name}, {group}: {len(some)} devices, mean {mean:.1%}, worst {min(some):.1%}"
        drawing.add(Text(10, middle + 4, shortened(group, left - 18)))
        drawing.add(Line(((x(min(some)), middle), (x(max(some)), middle)), colour, 1.4))
        drawing.add(Box(x(low), middle - 6, x(high) - x(low), 12, colour, 0.3, title=title))
        drawing.add(*_rings(devices, colour, x, middle))
        drawing.add(Dot(x(mean), middle, 4.6, colour, title=title))
        drawing.add(Text(width, middle + 4, f"{100 * mean:.1f}", "ink", 12, "end"))
    return drawing


def _rings(
    devices: Sequence[dict[str, Any]], colour: str, x: Scale, middle: float
) -> Iterator[Dot]:
    """Yield a ring for each device, of many at equal distances from the worst to the best."""
    ranked = sorted(devices, key=lambda served: served["accuracy"])
    for served in ranked[:: -(-len(ranked) // DEVICES)]:
        what = f"{served['accuracy']:.1%} of {served['samples']} samples"
        title = f"device {served['device']}, {served['group']}, runs {served['size']}: {what}"
        yield Dot(x(served["accuracy"]), middle, 3.0, colour, 0.55, fill=False, title=title)
