"""What a submodel with dropped blocks saves: time and bytes of a training step.

    python benchmarks/nefl.py [--repeats N] [--steps N] [--models NAME ...]

ResNet-18 of 16 channels and ResNet-56, images of 3x16x16, batch 32, SGD without momentum, one
thread. Submodels are the paper's by depth, at full width. Each one's step is compared with that of
the full model; beside it, the public code's way, in which a dropped block runs and is multiplied by
zero. All take turns in every repeat, so that they meet the same machine; a repeat is a few steps,
the shortest repeat counts, and figures are ratios over the full model. Time is the process's own on
its core, which others that share the core disturb less than the clock. Bytes are metered around a
step and equal the prediction, or the benchmark stops.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sizewise.exchange.plan import Submodel
from sizewise.memory.prediction import Meter
from sizewise.methods.nefl import NeFL
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import training_step
from sizewise.surgery.step_sizes import Branch, StepSize
from sizewise.methods.nefl.scaling import Scaled, published
from sizewise.training.task import ModelConfig, Task

IMAGE, BATCH, CLASSES = (3, 16, 16), 32, 10
MODELS = {
    "resnet18": ModelConfig("resnet18", {"base": 16, "maxpool": True}),
    "resnet56": ModelConfig("resnet56", {"projection": 1, "global_pool": True}),
}
HEADS = ("blocks kept", "parameters", "FLOPs", "time", "peak", "run times 0: time", "peak")


@dataclass
class Case:
    """A model that takes steps, and its best time so far."""

    module: nn.Module
    optimizer: Optimizer = field(init=False)
    seconds: float = float("inf")

    def __post_init__(self) -> None:
        self.module.train()
        self.optimizer = SGD(self.module.parameters(), lr=0.01)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Take one training step."""
        training_step(self.module, self.optimizer, images, labels)

    def timed(self, images: Tensor, labels: Tensor, steps: int) -> None:
        """Take some steps and keep the time of one, if it is the best."""
        start = time.process_time()
        for _ in range(steps):
            self.step(images, labels)
        self.seconds = min(self.seconds, (time.process_time() - start) / steps)

    def peak(self, images: Tensor, labels: Tensor) -> int:
        """Return the metered bytes of a step."""
        self.optimizer.zero_grad(set_to_none=True)
        with Meter() as meter:
            meter.track(self.module, self.optimizer, images, labels)
            self.step(images, labels)
        return meter.peak


def times_zero(method: NeFL, kept: Sequence[int]) -> nn.Module:
    """Return the full model whose dropped blocks run for nothing, as in the public code."""
    model = method.task.build()
    for number, path in enumerate(method.task.parts.blocks):
        block = model.get_submodule(path)
        for name, part in list(block.named_modules()):
            if isinstance(part, Branch):
                dropped = number not in kept
                block.set_submodule(name, StepSize(0.0 if dropped else 1.0, learns=not dropped))
    return model


def measure(method: NeFL, chosen: Sequence[Scaled], repeats: int, steps: int) -> list[str]:
    """Return a model's rows of the table."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((BATCH, *IMAGE), generator=generator)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    stage = method.task.stage(0)
    every = tuple(range(len(method.task.parts.blocks)))
    kept = [every if submodel.blocks is None else submodel.blocks for submodel in chosen]
    ours = [Case(method.submodels.build(Submodel(f"{b}", {"blocks": list(b)}))) for b in kept]
    theirs = [Case(times_zero(method, blocks)) for blocks in kept[:-1]]
    for turn in range(1 + repeats):
        for case in (*ours, *theirs):
            case.timed(images, labels, steps)
            if turn == 0:  # The first one compiles kernels.
                case.seconds = float("inf")
    peaks = [case.peak(images, labels) for case in ours]
    costs = [method.predicted(case.module, stage) for case in ours]
    for cost, peak in zip(costs, peaks, strict=True):
        if peak != cost.footprint.peak:
            raise SystemExit(f"predicted {cost.footprint.peak:,} bytes, metered {peak:,}")
    work = [cost.flops for cost in costs]
    size = [sum(p.numel() for p in case.module.parameters()) for case in ours]
    whole, rows = ours[-1], []
    for number, (blocks, case) in enumerate(zip(kept, ours, strict=True)):
        cells = [f"{method.task.model.name}, {len(blocks)} of {len(every)}"]
        cells += [f"{values[number] / values[-1]:.2f}" for values in (size, work)]
        cells += [f"{case.seconds / whole.seconds:.2f}", f"{peaks[number] / peaks[-1]:.2f}"]
        if case is whole:
            cells += [f"({1e3 * whole.seconds:.0f} ms)", f"({peaks[-1] / 1e6:.2f} MB)"]
        else:
            zero = theirs[number]
            cells += [f"{zero.seconds / whole.seconds:.2f}"]
            cells += [f"{zero.peak(images, labels) / peaks[-1]:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", sep="\n")
    for name in chosen.models:
        recipe = Recipe(batch=BATCH, momentum=0.0, weight_decay=0.0, norm="tracked")
        method = NeFL(Task(MODELS[name], recipe, IMAGE, CLASSES))
        for row in measure(method, published(name, "depth"), chosen.repeats, chosen.steps):
            print(row, flush=True)
    print(f"\nLoad average at the end: {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
