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
from shared import common, inside
from sizewise.methods.fedepth import FeDepth

BATCH = 32
BLOCKS = (20.02, 20.02, 20.02, 14.05, 10.07, 10.07, 7.21, 5.28, 5.28)
WHOLE = 116.04
WIDTHS = {"1/6": 19.34, "1/3": 38.68, "1/2": 58.02, "1": WHOLE}


def main() -> None:
    """Write the table."""
    scale = common.scale(__doc__, "paper")
    task = shared.task(shared.IMAGE[scale], BATCH)
    method = FeDepth(task)
    tracked = FeDepth(replace(task, recipe=replace(task.recipe, norm="tracked")))
    counted = inside.counted(method)

    def row(name: str, published: float, *ours: float) -> str:
        cells = [f"{published:.2f}" if scale == "paper" else "-"]
        cells += [f"{value / shared.MIB:.2f}" for value in ours]
        return f"| {name} | {' | '.join([*cells, '-'][:4])} |"

    heads = ("MiB", "published", "our accounting", "predicted peak", "frozen blocks in parts")
    lines = common.table(*heads)
    for number, (published, ours) in enumerate(zip(BLOCKS, counted.blocks, strict=True)):
        peaks = [inside.block_footprint(each, number).peak for each in (method, tracked)]
        lines.append(row(f"block {number + 1}", published, ours, *peaks))
    whole = [inside.footprint(each).peak for each in (method, tracked)]
    lines.append(row("whole", WHOLE, counted.total, *whole))
    for width, published in WIDTHS.items():
        ratio = float(Fraction(width))
        peak = inside.width_footprint(task, ratio).peak
        lines.append(row(f"width {width}", published, counted.total * ratio, peak))
    common.write(lines, common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
