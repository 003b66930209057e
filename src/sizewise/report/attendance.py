"""Who took part in each round, who was refused, and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sizewise.report import scales
from sizewise.report.chart import NARROW, Chart, lanes
from sizewise.report.drawing import Box, Drawing, Line, Text, shortened
from sizewise.report.records import Run, by_row
from sizewise.report.scales import Scale

BINS = 100
"""Columns drawn at most; longer runs have several rounds in each."""


@dataclass(frozen=True)
class Class:
    """A device class in one run: how many of it trained and were refused, by round."""

    group: str
    trained: Counter[int]
    refused: Counter[int]


def classes(run: Run) -> list[Class]:
    """Return the device classes of a run, in the order of the fleet."""
    names = dict.fromkeys(row["group"] for row in run.plan)
    names |= dict.fromkeys(line["group"] for line in run.updates)
    found = {name: Class(name, Counter(), Counter()) for name in names}
    for line in run.updates:
        one = found[line["group"]]
        (one.trained if line["refused"] is None else one.refused)[line["round"]] += 1
    return list(found.values())


def reasons(runs: Sequence[Run]) -> list[tuple[tuple[str, str, str], int]]:
    """Return why devices were refused, most often first: (row, class, reason) and how often."""
    return Counter(
        (run.row, line["group"], line["refused"])
        for run in runs
        for line in run.updates
        if line["refused"] is not None
    ).most_common()


def chart(runs: Sequence[Run]) -> Chart:
    """Return a strip for each device class, method by method; of several seeds the first."""
    rows = {name: some[0] for name, some in by_row(runs).items()}
    data = [
        {
            "row": name,
            "class": one.group,
            "round": line["round"],
            "trained": one.trained[line["round"]],
            "refused": one.refused[line["round"]],
        }
        for name, run in rows.items()
        for one in classes(run)
        for line in run.history
    ]
    seed = f" Seed {next(iter(rows.values())).seed}." if len(runs) > len(rows) else ""
    return Chart(
        "participation",
        "Who took part",
        "Devices of each class that were asked, round by round: filled boxes trained, red frames "
        f"were refused. On the right: how many trained of those asked.{seed}",
        data,
        lambda width: _draw(rows, width),
    )


def _draw(rows: dict[str, Run], width: float) -> Drawing:
    narrow = width <= NARROW
    left, right, step = (64.0 if narrow else 110.0), width - 64, 32.0
    found = {name: classes(run) for name, run in rows.items()}
    count = sum(map(len, found.values()))
    height = 24 * len(rows) + step * count + 36
    drawing = Drawing(width, height, f"Who took part in each round of {', '.join(rows)}")
    rounds = max(len(run.history) for run in rows.values())
    together = -(-rounds // BINS)
    bins = -(-rounds // together)
    x = Scale(0, bins, left, right)
    for _, colour, one, y in lanes(drawing, found, 4, step):
        _strip(drawing, one, colour, x, y, together, bins)
        drawing.add(Text(10, y + 18, shortened(one.group, left - 18)))
        trained, refused = one.trained.total(), one.refused.total()
        words = f"{trained} of {trained + refused}"
        tint = "bad" if refused and not trained else "ink"
        drawing.add(Text(width, y + 18, words, tint, 12, "end"))
    for mark in scales.rounds(rounds, 4 if narrow else 8):
        at = x(max(mark - 1, 0) / together + 0.5)
        if mark:
            drawing.add(Text(at, height - 18, scales.number(mark), "muted", 11, "middle"))
    drawing.add(Text(right, height - 4, "round", "muted", 11, "end"))
    return drawing


def _strip(
    drawing: Drawing, one: Class, colour: str, x: Scale, y: float, together: int, bins: int
) -> None:
    """Draw the rounds of a class: a column for each, a box for its devices."""
    columns = []
    for place in range(bins):
        some = range(place * together + 1, (place + 1) * together + 1)
        columns.append((sum(one.trained[r] for r in some), sum(one.refused[r] for r in some)))
    most = max((trained + refused for trained, refused in columns), default=0)
    drawing.add(Line(((x(0), y + 27), (x(bins), y + 27)), "rule"))
    if not most:
        return
    unit = min(24 / most, 6.0)
    inner = max(x(1) - x(0) - 2, 0.8)
    for place, (trained, refused) in enumerate(columns):
        left, bottom = x(place) + 1, y + 26
        if trained:
            tall = trained * unit
            drawing.add(Box(left, bottom - tall, inner, tall, colour))
        if refused:
            top = bottom - (trained + refused) * unit
            drawing.add(Box(left, top, inner, refused * unit, "bad", 1.0, fill=False))
        # Between devices a thin gap, as long as one can be seen.
        if unit >= 4:
            levels = [bottom - level * unit for level in range(1, trained + refused)]
            drawing.add(*(Line(((left, at), (left + inner, at)), "paper") for at in levels))
