"""FedIN, Figure 5: seconds a round, for each method.

    python papers/fedin/fig5_seconds.py [--scale mini] [--suite papers/fedin/table2.toml]

Reads the suite's runs under `runs/papers/` and writes `fig5_seconds.SCALE.svg` and `.md` beside it:
the median over rounds of the time a round took, without the rounds that end in an evaluation, and
its quartiles. All devices of a round run one after the other on one core, and so does FedGKT's
server; the paper's devices share a GPU.
"""

from matplotlib import pyplot
from numpy import percentile

import shared
from shared import common

PUBLISHED = {"FedIN": 81, "FedGKT": 203, "HeteroFL": 1270}
"""Seconds per round on CIFAR-10, from the paper."""


def main() -> None:
    """Draw the figure and write the numbers."""
    runs = common.runs_of(__doc__, shared.HERE / "table2.toml")
    rows = shared.histories(runs)
    lines = common.table("", "seconds a round", "quartiles", "published")
    figure, axes = pyplot.subplots(figsize=(6, 0.8 + 0.45 * len(rows)), layout="constrained")
    for place, (row, seeds) in enumerate(reversed(rows.items())):
        seconds = [line["seconds"] for rounds in seeds for line in rounds if "accuracy" not in line]
        low, median, high = percentile(seconds, (25, 50, 75))
        axes.barh(place, median, color=common.COLOURS[0], height=0.6)
        axes.plot([low, high], [place, place], color="black")
        lines.insert(
            2, f"| {row} | {median:.1f} | {low:.1f} to {high:.1f} | {PUBLISHED.get(row, '')} |"
        )
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.set_xlabel("seconds a round, one core: median and quartiles")
    common.plain(axes)
    common.save(figure, runs.beside(__file__, "svg"))
    common.write(lines, runs.beside(__file__, "md"))


if __name__ == "__main__":
    main()
