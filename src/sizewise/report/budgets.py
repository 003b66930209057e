"""Memory of each device class: predicted, metered, and its limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sizewise.common.structure import format_bytes
from sizewise.report import scales
from sizewise.report.chart import NARROW, Chart, grid_x, lanes
from sizewise.report.drawing import Box, Drawing, Line, Text, shortened
from sizewise.report.records import Run, by_row
from sizewise.report.scales import Scale


@dataclass(frozen=True)
class Use:
    """A device class under one method; bytes, None where unknown or unlimited."""

    group: str
    budget: int | None
    predicted: int | None
    metered: int | None
    refused: bool


def uses(runs: Sequence[Run]) -> list[Use]:
    """Return each device class of a method's runs, in the order of the fleet."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for row in run.plan:
            groups.setdefault(row["group"], []).append(row)
        for line in run.updates:
            groups.setdefault(line["group"], []).append(line)
    return [
        Use(
            group,
            _most(entries, "budget"),
            _most(entries, "predicted"),
            _most(entries, "peak_bytes"),
            all(entry.get("refused") for entry in entries),
        )
        for group, entries in groups.items()
    ]


def _most(entries: Sequence[dict[str, Any]], key: str) -> int | None:
    return max((entry[key] for entry in entries if entry.get(key)), default=None)


def chart(runs: Sequence[Run]) -> Chart:
    """Return a bar for each device class, method by method."""
    rows = {name: uses(some) for name, some in by_row(runs).items()}
    data = [{"row": name, **vars(use)} for name, some in rows.items() for use in some]
    return Chart(
        "memory",
        "Memory against budget",
        "Bytes at the peak of one training step. Light bar: predicted before training; solid bar: "
        "metered while training; upright stroke: the limit. An empty bar is what a device would "
        "have needed that could not take part.",
        data,
        lambda width: _draw(rows, width),
    )


def _draw(rows: dict[str, list[Use]], width: float) -> Drawing:
    narrow = width <= NARROW
    left, step = (64.0 if narrow else 110.0), 26.0
    right = width - (92 if narrow else 170)
    count = sum(map(len, rows.values()))
    height = 24 * len(rows) + step * count + 30
    drawing = Drawing(width, height, f"Memory of each device class under {', '.join(rows)}")
    uses = [use for some in rows.values() for use in some]
    known = [value for use in uses for value in (use.budget, use.predicted, use.metered) if value]
    highest = max(known, default=1)
    unit, size = scales.unit("sent", highest)
    x = Scale(0, highest / size, left, right)
    marks = scales.inside(scales.ticks(0, highest / size, 3 if narrow else 6), highest / size)
    grid_x(drawing, x, {mark: f"{scales.number(mark)} {unit}" for mark in marks}, 6, height - 26)
    for _, colour, use, y in lanes(drawing, rows, 8, step):
        _bar(drawing, use, colour, x, y, size)
        drawing.add(Text(10, y + 14, shortened(use.group, left - 18)))
        words, tint = _words(use, narrow), "bad" if use.refused else "ink"
        drawing.add(Text(width, y + 14, words, tint, 12, "end"))
    return drawing


def _bar(drawing: Drawing, use: Use, colour: str, x: Scale, y: float, size: float) -> None:
    def long(value: int | None) -> float:
        return x((value or 0) / size) - x(0)

    known = {"limit": use.budget, "predicted": use.predicted, "metered": use.metered}
    title = ", ".join(f"{name} {format_bytes(value)}" for name, value in known.items() if value)
    if use.refused:
        drawing.add(Box(x(0), y + 4, long(use.predicted), 12, "bad", 0.9, False, title))
    else:
        drawing.add(Box(x(0), y + 2, long(use.predicted), 16, colour, 0.3, title=title))
        drawing.add(Box(x(0), y + 6, long(use.metered), 8, colour, title=title))
    if use.budget:
        at = x(0) + long(use.budget)
        drawing.add(Line(((at, y), (at, y + 20)), "ink", 2.2))


def _words(use: Use, narrow: bool) -> str:
    if use.refused:
        return f"needs {format_bytes(use.predicted or 0)}"
    if use.metered is None:
        return "not sampled"
    if use.budget is None or narrow:
        return format_bytes(use.metered)
    return f"{format_bytes(use.metered)} of {format_bytes(use.budget)}"
