"""Which device holds how many samples of which class."""

from collections.abc import Sequence

from sizewise.report.chart import NARROW, Chart
from sizewise.report.drawing import Dot, Drawing, Text
from sizewise.report.records import Run

DEVICES, CLASSES = 40, 40
"""How many are drawn at most; the data has up to a thousand devices."""


def chart(runs: Sequence[Run]) -> Chart | None:
    """Return a dot for each device and class; None for a run without a partition."""
    run = runs[0]
    counts: list[list[int]] = run.partition.get("histogram", [])
    if not counts:
        return None
    data = [
        {"device": device, "label": label, "samples": samples}
        for device, row in enumerate(counts)
        for label, samples in enumerate(row)
    ]
    total = run.partition["samples"]
    note = "Area of a dot: samples of a class (row) on a device (column). "
    if total["min"] == total["max"]:
        note += f"Every device trains on {total['min']:,} samples."
    else:
        note += f"Devices train on {total['min']:,} to {total['max']:,} samples, "
        note += f"{total['mean']:,.0f} on average."
    if len({one.seed for one in runs}) > 1:
        note += f" Seed {run.seed}; all methods of a seed share the split."
    if len(counts) > DEVICES:
        note += f" The first {DEVICES} of {run.partition['devices']:,} devices (fewer on a phone)."
    if len(counts[0]) > CLASSES:
        note += f" The first {CLASSES} of {len(counts[0])} classes."
    return Chart("labels", "Who holds which labels", note, data, lambda w: _draw(counts, w))


def _draw(counts: list[list[int]], width: float) -> Drawing:
    narrow = width <= NARROW
    shown = [row[:CLASSES] for row in counts[: 20 if narrow else DEVICES]]
    left, classes = 34.0, len(shown[0])
    column = (width - left) / len(shown)
    row = min(max(column, 9.0), 24.0)
    height = row * classes + 34
    drawing = Drawing(width, height, "Samples of each class on each device")
    most = max(max(some) for some in shown) or 1
    largest = min(column, row) / 2 - 0.6
    for label in range(classes):
        if row >= 11 or label % 5 == 0:
            words, y = str(label), row * label + row / 2 + 4
            drawing.add(Text(left - 10, y, words, "muted", 11, "end"))
    every = 1 if column >= 22 else 5
    for device, some in enumerate(shown):
        x = left + column * (device + 0.5)
        if device % every == 0:
            drawing.add(Text(x, height - 18, str(device), "muted", 11, "middle"))
        for label, samples in enumerate(some):
            if samples:
                radius = max(largest * (samples / most) ** 0.5, 0.6)
                title = f"device {device}, class {label}: {samples} samples"
                drawing.add(Dot(x, row * label + row / 2, radius, "s0", 0.85, title=title))
    drawing.add(Text(width, height - 3, "device", "muted", 11, "end"))
    drawing.add(Text(0, height - 3, "class", "muted", 11))
    return drawing
