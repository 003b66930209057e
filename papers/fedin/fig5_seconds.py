"""FedIN, Figure 5: seconds a round, for each method.

    python papers/fedin/fig5_seconds.py [--scale mini]

Reads the runs of `table2.toml` under `runs/papers/` and writes `fig5_seconds.SCALE.svg` and `.md`:
the median over rounds of the time a round took, without the rounds that end in an evaluation, and
its quartiles. All devices of a round run one after the other on one core, and so does FedGKT's
server; the paper's devices share a GPU.
"""

import shared
from matplotlib import pyplot
from numpy import percentile

PUBLISHED = {"FedIN": 81, "FedGKT": 203, "HeteroFL": 1270}
"""Seconds per round on CIFAR-10, from the paper."""


def main() -> None:
    """Draw the figure and write the numbers."""
    scale = shared.scale(__doc__, "mini")
    rows = shared.histories("table2", scale)
    lines = ["| | seconds a round | quartiles | published |", "|---|---|---|---|"]
    figure, axes = pyplot.subplots(figsize=(6, 0.8 + 0.45 * len(rows)), layout="constrained")
    for place, (row, seeds) in enumerate(reversed(rows.items())):
        seconds = [line["seconds"] for rounds in seeds for line in rounds if "accuracy" not in line]
        low, median, high = percentile(seconds, (25, 50, 75))
        axes.barh(place, median, color=shared.COLOURS[0], height=0.6)
        axes.plot([low, high], [place, place], color="black")
        lines.insert(
            2, f"| {row} | {median:.1f} | {low:.1f} to {high:.1f} | {PUBLISHED.get(row, '')} |"
        )
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.set_xlabel("seconds a round, one core: median and quartiles")
    axes.spines[["top", "right"]].set_visible(False)
    shared.save(figure, shared.HERE / f"fig5_seconds.{scale}.svg")
    shared.write(lines, shared.HERE / f"fig5_seconds.{scale}.md")


if __name__ == "__main__":
    main()
