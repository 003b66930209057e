"""FedIN, Figure 6: accuracy against wall time, for each method.

    python papers/fedin/fig6_time.py [--scale mini] [--suite papers/fedin/table2.toml]

Reads the suite's runs under `runs/papers/` and writes `fig6_time.SCALE.svg` beside it. Time is that
of training on one core; evaluations are counted too, so rows with many models have a little more.
Lines are means over seeds, bands reach from the lowest to the highest.
"""

from itertools import accumulate

import numpy as np
from matplotlib import pyplot

import shared
from shared import common


def main() -> None:
    """Draw the figure."""
    runs = common.runs_of(__doc__, shared.HERE / "table2.toml")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, (row, seeds) in enumerate(shared.histories(runs).items()):
        curves = []
        for rounds in seeds:
            clock = accumulate(line["seconds"] for line in rounds)
            pairs = zip(clock, rounds, strict=True)
            curves.append([(t / 60, 100 * r["accuracy"]) for t, r in pairs if "accuracy" in r])
        shortest = min(map(len, curves))
        minutes, accuracy = np.moveaxis(np.array([curve[:shortest] for curve in curves]), -1, 0)
        colour = common.COLOURS[number]
        axes.plot(minutes.mean(0), accuracy.mean(0), color=colour, label=row)
        spread = (accuracy.min(0), accuracy.max(0))
        axes.fill_between(minutes.mean(0), *spread, color=colour, alpha=0.15, lw=0)
    axes.set_xlabel("minutes on one core")
    axes.set_ylabel("accuracy %, mean over devices")
    common.plain(axes)
    axes.legend(frameon=False)
    common.save(figure, runs.beside(__file__, "svg"))


if __name__ == "__main__":
    main()
