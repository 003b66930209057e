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

from matplotlib import pyplot
from matplotlib.axes import Axes

import shared
from shared import common, inside
from sizewise.memory.packing import pack_blocks
from sizewise.methods.fedepth import FeDepth
from sizewise.runs import preparation
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
    capacity = float(Fraction(ratio)) if budget is None else budget
    return Row(ratio, budget, *(inside.decomposition(method, capacity) or ((), 0)))


def tables(task: Task, ratios: Sequence[str]) -> dict[str, list[Row]]:
    """Return the three ways to read a budget."""
    published = FeDepth(task, FeDepth.Options(assign="ratio"))
    exact = FeDepth(task)
    share = {ratio: preparation.bytes_of_share(task, float(Fraction(ratio))) for ratio in ratios}
    width = {ratio: preparation.bytes_of_ratio(task, float(Fraction(ratio))) for ratio in ratios}
    return {
        "as published": [row(published, ratio, None) for ratio in ratios],
        "in bytes: a share of the paper's count": [row(exact, r, b) for r, b in share.items()],
        "in bytes: what that width costs": [row(exact, r, b) for r, b in width.items()],
    }


def draw(axes: Axes, rows: Sequence[Row], blocks: int) -> None:
    """Draw each run of blocks as one bar; blocks that do not fit are left white."""
    for place, found in enumerate(reversed(rows)):
        axes.barh(place, blocks, left=0.5, height=0.7, color="none", edgecolor="#bbbbbb")
        for number, run in enumerate(found.runs):
            colour = common.COLOURS[number % len(common.COLOURS)]
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
    common.plain(axes)


def main() -> None:
    """Draw the figure and write its decompositions."""
    scale = common.scale(__doc__, "paper")
    task = shared.task(shared.IMAGE[scale], shared.BATCH[scale], shared.MODEL[scale])
    found = tables(task, ("1/3", "1") if scale == common.SMOKE else RATIOS)
    blocks = len(task.parts.blocks)
    figure, panels = pyplot.subplots(1, len(found), figsize=(13, 3.2), layout="constrained")
    for (title, rows), axes in zip(found.items(), panels, strict=True):
        draw(axes, rows, blocks)
        axes.set_title(title)
    common.save(figure, common.target(__file__, scale, "svg"))
    lines = common.table("budget", *found)
    for same in zip(*found.values(), strict=True):
        cells = [
            f"{r}" if r.budget is None else f"{r.budget / shared.MIB:.1f} MiB: {r}" for r in same
        ]
        lines.append(f"| {same[0].ratio} | {' | '.join(cells)} |")
    lines += ["", *common.table("toy budget", "the paper's", "ours")]
    for budget, expected in TOY.items():
        packing = pack_blocks(lambda i, j: sum(LAYERS[i:j]), len(LAYERS), budget)
        paper = " ".join(f"[{run[0]}-{run[-1]}]" if run[1:] else f"[{run[0]}]" for run in expected)
        ours = " ".join(f"[{_span(run)}]" for run in packing.stages)
        lines.append(f"| {budget} GB | {paper} | {ours} |")
    common.write(lines, common.target(__file__, scale, "md"))


def _span(run: Sequence[int]) -> str:
    """Return blocks for people, counted from 1."""
    return f"{run[0] + 1}" if len(run) == 1 else f"{run[0] + 1}-{run[-1] + 1}"


if __name__ == "__main__":
    main()
