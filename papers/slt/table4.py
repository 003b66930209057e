"""SLT, Table 4: how many steps each model has at each constraint, and how wide their heads are.

    python papers/slt/table4.py [--scale paper]

Writes `table4.SCALE.md`: the number of steps N that the paper prints (where we know it) and its
public code has, and ours by the same accounting; by how much the widths of the heads differ at
most; and which share of the budget the public code's configurations take by our count, step by
step: exact searches end just below 100 %. Then, for every step, both widths in channels of the
widest layer. At mini scale images have half the side, so the published columns are empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import shared
from shared import common, inside


@dataclass(frozen=True)
class Published:
    """What is known of a model at a constraint.

    Attributes:
        model: Its name.
        ratio: The constraint.
        steps: N in the public code.
        widths: The heads' widths in its table, for steps 1, 2, ...; or only the first ones.
        printed: N in the paper's Table 4, where we know that it is another.
    """

    model: str
    ratio: float
    steps: int
    widths: Sequence[float]
    printed: int | None = None


TABLES = (
    Published(
        "resnet20",
        0.125,
        16,
        (0.03, 0.03, 0.03, 0.03, 0.06, 0.07, 0.08, 0.2, 0.2, 0.28, 0.28, 0.4, 0.4, 0.7, 0.8, 1),
    ),
    Published(
        "resnet20",
        0.25,
        12,
        (0.185, 0.19, 0.19, 0.25, 0.25, 0.35, 0.35, 0.5, 0.5, 0.7, 0.8, 1),
        printed=14,
    ),
    Published("resnet20", 0.5, 8, (0.47, 0.5, 0.55, 0.64, 0.68, 0.83, 0.95, 1)),
    Published("resnet44", 0.125, 34, (0.124,), printed=14),
    Published("resnet44", 0.25, 26, (0.24,)),
    Published(
        "resnet44",
        0.5,
        14,
        (0.49, 0.51, 0.53, 0.55, 0.57, 0.62, 0.64, 0.68, 0.71, 0.76, 0.81, 0.87, 0.92, 1),
    ),
    Published(
        "densenet40",
        0.33,
        15,
        (0.14, 0.14, 0.14, 0.14, 0.14, 0.15, 0.16, 0.15, 0.22, 0.32, 0.38, 0.55, 0.68, 0.95, 1),
    ),
    Published("densenet40", 0.66, 10, (0.58, 0.6, 0.63, 0.66, 0.68, 0.74, 0.81, 0.91, 0.99, 1)),
)


def main() -> None:
    """Search all tables and write them beside the published ones."""
    scale = common.scale(__doc__, "paper")
    steps = ("N, paper", "N, public code", "N, ours", "largest difference in s")
    shares_head = "public code's share of the budget, %"
    summary = common.table("", "constraint", "layers", *steps, shares_head)
    heads = common.table("", "channels of", "public code", "ours")
    for known in [TABLES[2]] if scale == common.SMOKE else TABLES:
        method = inside.heads(shared.task(known.model, scale, known.ratio), known.ratio)
        ours = method.widths
        published = known.widths if scale == "paper" else ()
        pairs = list(zip(published, ours, strict=False))
        cells = ["-", "-", f"{len(ours)}", "-", "-"]
        if published:
            apart = max(abs(theirs - width) for theirs, width in pairs)
            part = "" if len(published) == known.steps else f" (step {len(published)} only)"
            shares = (100 * method.share(n, s) for n, s in enumerate(published, 1))
            cells = [str(known.printed or "-"), str(known.steps), cells[2], f"{apart:.3f}{part}"]
            cells.append(" ".join(f"{share:.0f}" for share in shares))
        name = f"{known.model}, {known.ratio:g}"
        summary.append(f"| {name.replace(', ', ' | ')} | {method.layers} | {' | '.join(cells)} |")
        # As the public code rounds: down, and to at least one channel.
        theirs = " ".join(str(max(1, int(s * method.channels))) for s in published)
        if published and len(published) < known.steps:
            theirs += " ..."
        found = " ".join(str(round(s * method.channels)) for s in ours)
        heads.append(f"| {name} | {method.channels} | {theirs or '-'} | {found} |")
        print(summary[-1], flush=True)
    common.write([*summary, "", *heads], common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
