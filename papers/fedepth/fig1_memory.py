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

import shared
import torch
from matplotlib import pyplot

from sizewise.memory import accounting
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
    if scale == "mini":
        vit = shared.task(image, batch, "vit", dim=48, depth=6, heads=3)
    else:
        vit = shared.task((3, 224, 224), batch, "vit_tiny")
    return {"PreResNet-20": shared.task(image, batch), vit.model.name: vit}


def bars(task: Task) -> list[Bar]:
    """Return the whole model and each of its blocks."""
    method = FeDepth(task)
    inputs = torch.empty((task.recipe.batch, *task.input_shape), device="meta")
    counted = accounting.summary(task.build(), inputs, method.task.parts)
    (whole,) = method.stages(0)
    found = [Bar("whole", asdict(method.footprint(method.main, whole)), counted.total)]
    for number, paper in enumerate(counted.blocks):
        # A budget of nothing makes it save what it can: frozen blocks of the transformer, whose
        # norms do not look at the batch, run on an eighth of it at a time.
        schedule = method._run(0, number, number + 1, ())
        (stage,) = schedule.stages
        parts = asdict(method.footprint(schedule.submodel, stage))
        found.append(Bar(f"block {number + 1}", parts, paper))
    return found


def main() -> None:
    """Draw the figure and write its numbers."""
    scale = shared.scale(__doc__, "paper")
    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    lines = [
        f"| MiB | {' | '.join(part.replace('_', ' ') for part in PARTS)} | peak | the paper's |",
        "|---" * (len(PARTS) + 3) + "|",
    ]
    for column, batch in enumerate(BATCHES):
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
            axes.spines[["top", "right"]].set_visible(False)
            for bar in found:
                sizes = [bar.parts[part] for part in (*PARTS, "peak")] + [bar.counted]
                cells = " | ".join(f"{size / shared.MIB:.2f}" for size in sizes)
                lines.append(f"| {name}, batch {batch}, {bar.name} | {cells} |")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, ncols=4, loc="outside upper center")
    shared.save(figure, shared.HERE / f"fig1_memory.{scale}.svg")
    shared.write(lines, shared.HERE / f"fig1_memory.{scale}.md")


if __name__ == "__main__":
    main()
