"""SLT, Appendix E: what the memory of training is for: weights, gradients or activations.

    python papers/slt/appendix_e.py [--scale paper]

Writes `appendix_e.SCALE.md`: for the paper's models at batch 32, the shares by the paper's
accounting, which adds up the outputs of all layers, and at the peak of a real training step, as we
predict it byte by byte; there, also the optimiser's momentum, the batch and temporaries. At mini
scale images have half the side.
"""

import torch

import shared
from shared import common, inside
from sizewise.families.base import Method
from sizewise.memory import accounting

MIB = 2**20


def row(model: str, scale: str) -> str:
    """Return the shares of one model."""
    task = shared.task(model, scale)
    module = task.build()
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    images = torch.empty((shared.BATCH, *task.input_shape), device="meta")
    counted = accounting.hooks(module, images)
    # By the paper's accounting, gradients of weights are as large as these, all alive together.
    paper = [f"{100 * part / counted:.1f}" for part in (weights, weights, counted - 2 * weights)]
    real = inside.footprint(Method(task))
    others = real.optimizer_state + real.batch + real.workspace
    parts = (real.parameters, real.gradients, real.activations, others)
    step = [f"{100 * part / real.peak:.1f}" for part in parts]
    cells = [f"{counted / MIB:.1f}", *paper, f"{real.peak / MIB:.1f}", *step]
    return f"| {model}, {task.input_shape[1]}x{task.input_shape[2]} | {' | '.join(cells)} |"


def main() -> None:
    """Write the table."""
    scale = common.scale(__doc__, "paper")
    parts = ("weights %", "gradients %", "activations %")
    lines = common.table("batch 32", "paper's MiB", *parts, "peak MiB", *parts, "others %")
    lines += [row(model, scale) for model in shared.DATA]
    common.write(lines, common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
