"""SLT, Figure 7: accuracy and step over the rounds of a run.

    python papers/slt/fig7_steps.py [--scale mini] [--suite papers/slt/table1.toml]

Reads what `suite.py` left under `runs/papers/` and writes `fig7_steps.SCALE.svg` beside the suite:
one panel for each row that trains with slt; lines are means over the seeds that are there. The
paper has ResNet-20, ResNet-44 and DenseNet-40; Table 1 has ResNet-20 at several constraints.
"""

from pathlib import Path

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

import shared
from shared import common

BLUE, RED = "#4477aa", "#ee6677"


def accuracies(folder: Path) -> dict[int, float]:
    """Return a run's accuracy in percent by round."""
    lines = common.lines_of(folder / "history.jsonl")
    return {line["round"]: 100 * line["accuracy"] for line in lines if "accuracy" in line}


def steps(folder: Path) -> dict[int, int]:
    """Return a run's step by round: how many layers had full width."""
    lines = common.lines_of(folder / "updates.jsonl")
    held = {line["round"]: line["submodel"] for line in lines if "submodel" in line}
    # The full model, without a head that is narrower, comes after all others.
    last = max((one["full"] for one in held.values() if one["width"] < 1), default=-1) + 1
    return {number: one["full"] if one["width"] < 1 else last for number, one in held.items()}


def draw(axes: Axes, folders: list[Path], title: str) -> None:
    """Draw the runs of one row: accuracy on the left, steps on the right."""
    runs = [accuracies(folder) for folder in folders]
    rounds = sorted(set(runs[0]).intersection(*runs[1:]))
    axes.plot(rounds, [np.mean([run[r] for run in runs]) for r in rounds], color=BLUE)
    right = axes.twinx()
    found = steps(folders[0])  # The same in all seeds, unless they stop early.
    right.step(list(found), list(found.values()), color=RED, where="mid")
    axes.set_title(title)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy %", color=BLUE)
    right.set_ylabel("step", color=RED)


def main() -> None:
    """Draw what has been run so far."""
    runs = common.runs_of(__doc__, shared.HERE / "table1.toml")
    every = runs.tables["row"].items()
    rows = runs.begun([row for row, changes in every if changes["method"]["name"] == "slt"])
    size = (4 * len(rows), 3)
    figure, panels = pyplot.subplots(
        1, len(rows), figsize=size, layout="constrained", squeeze=False
    )
    for (row, folders), axes in zip(rows.items(), panels[0], strict=True):
        draw(axes, folders, row)
    common.save(figure, runs.beside(__file__, "svg"))


if __name__ == "__main__":
    main()
