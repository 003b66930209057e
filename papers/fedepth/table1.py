"""FeDepth, Table 1: what each block, and each width, of PreResNet-20 costs.

    python papers/fedepth/table1.py [--scale paper]

Writes `table1.SCALE.md`: the paper's figures (batch 32, 32x32 images), the same by our
implementation of its accounting, and what a training step of the block alone, everything before it
frozen, really holds at its peak. The frozen blocks run on the whole batch, or, which needs norms
that track their statistics, on an eighth of it at a time. At mini scale images are 16x16, as in the
suites.
"""

from dataclasses import replace
from fractions import Fraction

import shared
import torch

from sizewise.families.widthwise import Widthwise
from sizewise.memory import accounting
from sizewise.methods.fedepth import FeDepth

BATCH = 32
BLOCKS = (20.02, 20.02, 20.02, 14.05, 10.07, 10.07, 7.21, 5.28, 5.28)
WHOLE = 116.04
WIDTHS = {"1/6": 19.34, "1/3": 38.68, "1/2": 58.02, "1": WHOLE}


def main() -> None:
    """Write the table."""
    scale = shared.scale(__doc__, "paper")
    task = shared.task(shared.IMAGE[scale], BATCH)
    method, widthwise = FeDepth(task), Widthwise(task)
    tracked = FeDepth(replace(task, recipe=replace(task.recipe, norm="tracked")))
    inputs = torch.empty((BATCH, *task.input_shape), device="meta")
    counted = accounting.summary(task.build(), inputs, method.task.parts)

    def row(name: str, published: float, *ours: float) -> str:
        cells = [f"{published:.2f}" if scale == "paper" else "-"]
        cells += [f"{value / shared.MIB:.2f}" for value in ours]
        return f"| {name} | {' | '.join([*cells, '-'][:4])} |"

    lines = [
        "| MiB | published | our accounting | predicted peak | frozen blocks in parts |",
        "|---|---|---|---|---|",
    ]
    for number, (published, ours) in enumerate(zip(BLOCKS, counted.blocks, strict=True)):
        peaks = (block_peak(method, number), block_peak(tracked, number))
        lines.append(row(f"block {number + 1}", published, ours, *peaks))
    stage = method.task.stage(0)
    whole = [m.peak(m.main, stage) for m in (method, tracked)]
    lines.append(row("whole", WHOLE, counted.total, *whole))
    for width, published in WIDTHS.items():
        ratio = float(Fraction(width))
        peak = widthwise.peak(widthwise.piece(ratio), stage)
        lines.append(row(f"width {width}", published, counted.total * ratio, peak))
    shared.write(lines, shared.HERE / f"table1.{scale}.md")


def block_peak(method: FeDepth, number: int) -> int:
    """Return the predicted peak of training one block and the head."""
    # A budget of nothing makes it save what it can.
    schedule = method._run(0, number, number + 1, ())
    return max(method.peak(schedule.submodel, stage) for stage in schedule.stages)


if __name__ == "__main__":
    main()
