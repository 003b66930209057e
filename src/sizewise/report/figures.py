"""Figures for papers and READMEs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sizewise.errors import ConfigError

PARTS = {
    "parameters": "#4477aa",
    "batch": "#bbbbbb",
    "gradients": "#66ccee",
    "optimizer_state": "#228833",
    "activations": "#ccbb44",
    "workspace": "#ee6677",
}
"""What a training step's bytes are for, in Paul Tol's colour-blind safe colours."""


def draw_plan(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw each device class's predicted bytes, by what they are for, against its budget.

    The rows are those of `preview.rows`; the path's ending chooses the format (svg, pdf, png).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.55 * len(rows)), layout="constrained")
    for place, row in enumerate(reversed(rows)):
        start = 0.0
        for part, colour in PARTS.items():
            width = row["bytes"][part] / 1e6
            label = part.replace("_", " ") if place == 0 else None
            faded = 0.35 if row["refused"] else 1.0
            axes.barh(place, width, left=start, color=colour, label=label, height=0.6, alpha=faded)
            start += width
        if row["budget"]:
            limit = row["budget"] / 1e6
            axes.plot([limit, limit], [place - 0.4, place + 0.4], color="black", linewidth=2)
        note = " cannot take part" if row["refused"] else f" {row['size']}"
        axes.text(max(start, (row["budget"] or 0) / 1e6), place, f" {note}", va="center")
    axes.set_yticks(range(len(rows)), [row["group"] for row in reversed(rows)])
    axes.set_ylabel("device class")
    axes.set_xlabel("MB at the peak of one training step; the black line is the budget")
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), ncols=3, loc="outside upper center")
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (ValueError, OSError) as error:
        sentence = str(error).splitlines()[0]
        raise ConfigError(f"the figure cannot be written to {str(path)!r}: {sentence}") from None
    finally:
        pyplot.close(figure)
