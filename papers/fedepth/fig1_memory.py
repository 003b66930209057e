"""FeDepth, Figure 1: what the bytes of one training step are for.

    python papers/fedepth/fig1_memory.py [--scale paper]

Writes `fig1_memory.SCALE.svg` and `.md`: for PreResNet-20 and a vision transformer, at batch 32 and
128, the predicted peak of training the whole model, and of training each block alone behind frozen
ones, by part; a mark shows what the paper's accounting (its Table 1) gives. The paper's own figure
quotes earlier work. The optimiser is SGD with momentum. At mini scale images are 16x16 and the
transformer has 6 blocks of 48 dimensions; at paper scale it is ViT-Tiny on 224x224. Gradients
are those that exist at the peak, which is often before most of them do.
"""

from dataclasses import asdict, dataclass

from matplotlib import pyplot

import shared
from shared import common, inside
from sizewise.methods.fedepth import FeDepth
from sizewise.report.figures import PARTS
from sizewise.training.task import Task

BATCHES = (32, 128)


@dataclass(frozen=True)
class Bar:
    """One way to train: its name, its bytes by part, and what the paper would count."""

    name: str
    parts: dict[str, int]
    counted: int


def tasks(scale: str, batch: int) -> dict[str, Task]:
    """Return a convolutional network and a transformer."""
    image = shared.IMAGE[scale]
    if scale == "paper":
        vit = shared.task((3, 224, 224), batch, "vit_tiny")
    else:
        depth = 2 if scale == common.SMOKE else 6
        vit = shared.task(image, batch, "vit", dim=48, depth=depth, heads=3)
    return {"PreResNet-20": shared.task(image, batch, shared.MODEL[scale]), vit.model.name: vit}


def bars(task: Task) -> list[Bar]:
    """Return the whole model and each of its blocks."""
    method = FeDepth(task)
    counted = inside.counted(method)
    found = [Bar("whole", asdict(inside.footprint(method)), counted.total)]
    for number, paper in enumerate(counted.blocks):
        parts = asdict(inside.block_footprint(method, number))
        found.append(Bar(f"block {number + 1}", parts, paper))
    return found


def main() -> None:
    """Draw the figure and write its numbers."""
    scale = common.scale(__doc__, "paper")
    batches = (2, 4) if scale == common.SMOKE else BATCHES
    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    parts = (part.replace("_", " ") for part in PARTS)
    lines = common.table("MiB", *parts, "peak", "the paper's")
    for column, batch in enumerate(batches):
        for (name, task), axes in zip(tasks(scale, batch).items(), panels[:, column], strict=True):
            found = bars(task)
            for place, bar in enumerate(reversed(found)):
                start = 0.0
                for part, colour in PARTS.items():
                    size = bar.parts[part] / shared.MIB
                    label = part.replace("_", " ") if place == 0 else None
                    axes.barh(place, size, left=start, color=colour, label=label, height=0.7)
                    start += size
                label = "the paper's accounting" if place == 0 else None
                axes.plot(bar.counted / shared.MIB, place, "D", color="black", ms=4, label=label)
            axes.set_yticks(range(len(found)), [bar.name for bar in reversed(found)])
            axes.set_title(f"{name}, batch {batch}")
            axes.set_xlabel("MiB at the peak of one training step")
            common.plain(axes)
            for bar in found:
                sizes = [bar.parts[part] for part in (*PARTS, "peak")] + [bar.counted]
                cells = " | ".join(f"{size / shared.MIB:.2f}" for size in sizes)
                lines.append(f"| {name}, batch {batch}, {bar.name} | {cells} |")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, ncols=4, loc="outside upper center")
    common.save(figure, common.target(__file__, scale, "svg"))
    common.write(lines, common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
