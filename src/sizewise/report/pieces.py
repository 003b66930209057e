"""What each device class trained: blocks and widths, as a picture of the model."""

from collections.abc import Sequence
from typing import Any

from sizewise.common.structure import format_bytes
from sizewise.report.chart import NARROW, Chart, lanes
from sizewise.report.drawing import Box, Drawing, Text, shortened
from sizewise.report.records import Run, by_row

NAMED = 24
"""Parts that can have a name above their column."""

LEFT = 210.0
"""Where the picture begins, right of the names of the classes."""


def chart(runs: Sequence[Run]) -> Chart | None:
    """Return a picture of the model for each device class; None for runs that know of no plan."""
    rows = {name: some[0].plan for name, some in by_row(runs).items() if some[0].plan}
    if not rows:
        return None
    data = [
        {
            "row": name,
            "group": entry["group"],
            "size": entry["size"],
            "part": part["name"],
            "width": part["width"],
            "stages": " ".join(map(str, part["stages"])),
        }
        for name, plan in rows.items()
        for entry in plan
        for part in entry["parts"]
    ]
    return Chart(
        "pieces",
        "What each class of devices trains",
        "The model from its first layers (left) to its head (right). A box is filled as high as "
        "the share of its channels that a device holds; strong colour learns, pale colour is held "
        "but frozen, empty is not there. Numbers are stages of training, one after the other. Of "
        "methods that draw their pieces anew, the largest is shown.",
        data,
        lambda width: _draw(rows, width),
    )


def _draw(rows: dict[str, list[dict[str, Any]]], width: float) -> Drawing:
    narrow = width <= NARROW
    step = 56.0 if narrow else 40.0
    count = sum(map(len, rows.values()))
    drawing = Drawing(
        width, 24 * len(rows) + step * count + 6, f"What each class trains: {', '.join(rows)}"
    )
    for name, colour, entry, y in lanes(drawing, rows, 4, step):
        if entry is rows[name][0] and not narrow:
            _heads(drawing, rows[name], y - 6, width)
        _line(drawing, entry, colour, y, width, narrow)
    return drawing


def _heads(drawing: Drawing, plan: Sequence[dict[str, Any]], y: float, width: float) -> None:
    """Write the names of the parts above their columns, unless there are too many."""
    parts = next((entry["parts"] for entry in plan if entry["parts"]), ())
    cell = (width - LEFT) / max(len(parts), 1)
    for place, part in enumerate(parts if len(parts) <= NAMED else ()):
        words = shortened(part["name"].removeprefix("block "), cell, 10.5)
        middle = LEFT + place * cell + (cell - 3) / 2
        drawing.add(Text(middle, y, words, "muted", 10.5, "middle"))


def _line(
    drawing: Drawing, entry: dict[str, Any], colour: str, y: float, width: float, narrow: bool
) -> None:
    left, top, height = (10.0, y + 17, 26.0) if narrow else (LEFT, y + 2, 28.0)
    what = "cannot take part" if entry["refused"] else entry["size"]
    room = width - 20 if narrow else left - 20
    if narrow:
        words = shortened(f"{entry['group']}: {what}", room)
        drawing.add(Text(10, y + 11, words))
    else:
        drawing.add(Text(10, y + 13, entry["group"], bold=True))
        drawing.add(Text(10, y + 28, shortened(what, room, 11.5), "muted", 11.5))
    if entry["refused"]:
        short = f"needs {format_bytes(entry['predicted'])}, has {format_bytes(entry['budget'])}"
        drawing.add(Box(left, top, width - left, height, "rule", 1.0, False))
        drawing.add(Text(left + 10, top + height / 2 + 4, short, "bad"))
        return
    parts = entry["parts"]
    cell = (width - left) / max(len(parts), 1)
    several = len(entry["stages"]) > 1
    for place, part in enumerate(parts):
        x = left + place * cell
        inner = max(cell - 3, 1)
        filled = height * part["width"]
        title = f"{entry['group']}, {part['name']}: {part['width']:.0%} of the channels"
        title += f", stage {', '.join(map(str, part['stages']))}" if part["stages"] else ", frozen"
        learns = bool(part["stages"])
        drawing.add(Box(x, top, inner, height, "faint", 1.0, title=title))
        opacity = 0.92 if learns else 0.28
        drawing.add(Box(x, top + height - filled, inner, filled, colour, opacity, title=title))
        # A number that changes from part to part says something; one that all share does not.
        if several and learns and inner > 12 and len(part["stages"]) < len(entry["stages"]):
            words = str(part["stages"][0]) if len(part["stages"]) == 1 else "·"
            middle = x + inner / 2
            drawing.add(Text(middle, top + height - 6, words, "paper", 11, "middle", True))
