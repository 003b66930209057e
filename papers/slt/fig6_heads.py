"""SLT, Figure 6, its axis: how narrow the heads become when more layers learn at full width.

    python papers/slt/fig6_heads.py [--scale mini]

Writes `fig6_heads.SCALE.md`: for ResNet-20, two constraints and several values of `depth`, the
number of steps, the heads' widths in channels of 64, their mean share of s_n (the heads of depth
1), and the costliest step's share of the budget: above 100 % the layers do not fit even before a
head of one channel, and fig6.toml leaves that depth out.
"""

import shared
from shared import common, inside

RATIOS = (0.25, 0.5)
DEPTHS = (1, 2, 3, 4, 5)


def main() -> None:
    """Search the heads of all depths."""
    scale = common.scale(__doc__, "mini")
    ratios, depths = ((0.5,), (1, 2)) if scale == common.SMOKE else (RATIOS, DEPTHS)
    names = ("constraint", "layers at a time", "N", "share of s_n", "share of the budget, %")
    lines = common.table(*names, "channels of 64")
    for ratio in ratios:
        widest: list[float] = []
        for depth in depths:
            found = inside.heads(shared.task("resnet20", scale, ratio), ratio, depth)
            heads = found.widths
            widest = widest or heads
            # Where both have a head; after the last step of depth 1 there is none to compare with.
            shares = [width / most for width, most in zip(heads, widest, strict=False)]
            share, used = sum(shares) / len(shares), 100 * found.largest_share()
            channels = " ".join(str(round(64 * width)) for width in heads)
            cells = f"{ratio:g} | {depth} | {len(heads)} | {share:.2f} | {used:.0f} | {channels}"
            lines.append(f"| {cells} |")
            print(lines[-1], flush=True)
    common.write(lines, common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
