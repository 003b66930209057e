"""FeDepth, Figure 4: which blocks each budget trains together.

    python papers/fedepth/fig4_decomposition.py [--scale paper]

Writes `fig4_decomposition.SCALE.svg` and `.md`, for PreResNet-20 and every budget of the paper's
scenarios, three times: as published (its accounting, with 5 % to spare); with the same shares of
what it counts as bytes that a step must really fit; and with the bytes that training a model of
that width costs. The paper's toy example (layers of 3, 2, 1, 0.5, 0.5 and 0.5 GB) is in the `.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import shared
from matplotlib import pyplot
from matplotlib.axes import Axes

from sizewise.errors import BudgetTooSmall
from sizewise.methods.fedepth.schedule import Schedule
from sizewise.memory.packing import pack_blocks
from sizewise.methods.fedepth import FeDepth
from sizewise.runs import preparation
from sizewise.methods.fedepth.blocks import Blocks
from sizewise.training.task import Task

RATIOS = ("1/8", "1/6", "1/3", "1/2", "1", "7/6", "2")
"""Of Fair, Lack and Surplus, and 7/6: one whole model, and one block by block beside it."""

LAYERS = (3, 2, 1, 0.5, 0.5, 0.5)
TOY = {3: ([1], [2, 3], [4, 5, 6]), 5: ([1, 2], [3, 4, 5, 6])}


@dataclass(frozen=True)
class Row:
    """What a budget trains: runs of blocks of one model, and whole models beside it."""

    ratio: str
    budget: int | None
    runs: tuple[tuple[int, ...], ...]
    whole: int

    def __str__(self) -> str:
        runs = " ".join(f"[{_span(run)}]" for run in self.runs) or "refused"
        return f"{runs} beside {self.whole} whole" if self.whole else runs


def row(method: FeDepth, ratio: str, budget: int | None) -> Row:
    """Return what a device of this ratio, or with so many bytes, trains."""
    try:
        schedule = method.schedule(float(Fraction(ratio)) if budget is None else budget)
    except BudgetTooSmall:
        return Row(ratio, budget, (), 0)
    return Row(ratio, budget, *_runs(schedule, len(method.task.parts.blocks)))


def _runs(schedule: Schedule, blocks: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return the runs of the last model that a schedule trains, and how many whole ones it has."""
    stages = [stage.cut for stage in schedule.stages]
    if not stages[0]:
        return (tuple(range(blocks)),), 0
    last = [cut["peers"][-1] if cut["peers"] else cut["blocks"] for cut in stages]
    return tuple(Blocks.read(cut).learn for cut in last), len(stages[0]["peers"])


def tables(task: Task) -> dict[str, list[Row]]:
    """Return the three ways to read a budget."""
    published = FeDepth(task, FeDepth.Options(assign="ratio"))
    exact = FeDepth(task)
    share = {ratio: preparation.bytes_of_share(task, float(Fraction(ratio))) for ratio in RATIOS}
    width = {ratio: preparation.bytes_of_ratio(task, float(Fraction(ratio))) for ratio in RATIOS}
    return {
        "as published": [row(published, ratio, None) for ratio in RATIOS],
        "in bytes: a share of the paper's count": [row(exact, r, b) for r, b in share.items()],
        "in bytes: what that width costs": [row(exact, r, b) for r, b in width.items()],
    }


def draw(axes: Axes, rows: Sequence[Row], blocks: int) -> None:
    """Draw each run of blocks as one bar; blocks that do not fit are left white."""
    for place, found in enumerate(reversed(rows)):
        axes.barh(place, blocks, left=0.5, height=0.7, color="none", edgecolor="#bbbbbb")
        for number, run in enumerate(found.runs):
            colour = shared.COLOURS[number % len(shared.COLOURS)]
            axes.barh(place, len(run), left=run[0] + 0.5, height=0.7, color=colour, ec="white")
        if found.whole:
            axes.text(blocks + 0.6, place, f"+{found.whole} whole", va="center")
    names = [
        r.ratio if r.budget is None else f"{r.ratio} = {r.budget / shared.MIB:.1f} MiB"
        for r in reversed(rows)
    ]
    axes.set_yticks(range(len(rows)), names)
    axes.set_xticks(range(1, blocks + 1))
    axes.set_xlim(0.3, blocks + 2.2)
    axes.set_xlabel("block")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw the figure and write its decompositions."""
    scale = shared.scale(__doc__, "paper")
    task = shared.task(shared.IMAGE[scale], shared.BATCH[scale])
    found = tables(task)
    figure, panels = pyplot.subplots(1, len(found), figsize=(13, 3.2), layout="constrained")
    for (title, rows), axes in zip(found.items(), panels, strict=True):
        draw(axes, rows, len(FeDepth(task).parts.blocks))
        axes.set_title(title)
    shared.save(figure, shared.HERE / f"fig4_decomposition.{scale}.svg")
    lines = [f"| budget | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for same in zip(*found.values(), strict=True):
        cells = [
            f"{r}" if r.budget is None else f"{r.budget / shared.MIB:.1f} MiB: {r}" for r in same
        ]
        lines.append(f"| {same[0].ratio} | {' | '.join(cells)} |")
    lines += ["", "| toy budget | the paper's | ours |", "|---|---|---|"]
    for budget, expected in TOY.items():
        packing = pack_blocks(lambda i, j: sum(LAYERS[i:j]), len(LAYERS), budget)
        paper = " ".join(f"[{run[0]}-{run[-1]}]" if run[1:] else f"[{run[0]}]" for run in expected)
        ours = " ".join(f"[{_span(run)}]" for run in packing.stages)
        lines.append(f"| {budget} GB | {paper} | {ours} |")
    shared.write(lines, shared.HERE / f"fig4_decomposition.{scale}.md")


def _span(run: Sequence[int]) -> str:
    """Return blocks for people, counted from 1."""
    return f"{run[0] + 1}" if len(run) == 1 else f"{run[0] + 1}-{run[-1] + 1}"


if __name__ == "__main__":
    main()
