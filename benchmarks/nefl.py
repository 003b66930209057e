"""What a submodel with dropped blocks saves: time and bytes of a training step.

    python benchmarks/nefl.py [--repeats N] [--steps N] [--models NAME ...] [--smoke]

ResNet-18 of 16 channels and ResNet-56, images of 3x16x16, batch 32, SGD without momentum, one
thread. Submodels are the paper's by depth, at full width. Each one's step is compared with that of
the full model; beside it, the public code's way, in which a dropped block runs and is multiplied by
zero. All take turns in every repeat, so that they meet the same machine; a repeat is a few steps,
the shortest repeat counts, and figures are ratios over the full model. Time is the process's own on
its core, which others that share the core disturb less than the clock. Bytes are metered around a
step and equal the prediction, or the benchmark stops.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import common
from sizewise.memory.prediction import Meter
from sizewise.methods.nefl import NeFL
from sizewise.methods.nefl.scaling import Scaled, published
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import training_step
from sizewise.surgery.step_sizes import Branch, StepSize
from sizewise.training.task import ModelConfig, Task

IMAGE, BATCH, CLASSES = (3, 16, 16), 32, 10
MODELS = {
    "resnet18": ModelConfig("resnet18", {"base": 16, "maxpool": True}),
    "resnet56": ModelConfig("resnet56", {"projection": 1, "global_pool": True}),
}
HEADS = ("blocks kept", "parameters", "FLOPs", "time", "peak", "run times 0: time", "peak")


@dataclass
class Case:
    """A model that takes steps."""

    module: nn.Module
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.module.train()
        self.optimizer = SGD(self.module.parameters(), lr=0.01)

    def step(self, images: Tensor, labels: Tensor, times: int = 1) -> None:
        """Take some training steps."""
        for _ in range(times):
            training_step(self.module, self.optimizer, images, labels)

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
    for number, path in enumerate(common.block_paths(method)):
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
    every = tuple(range(len(common.block_paths(method))))
    kept = [every if submodel.blocks is None else submodel.blocks for submodel in chosen]
    ours = [Case(common.without_blocks(method, blocks)) for blocks in kept]
    theirs = [Case(times_zero(method, blocks)) for blocks in kept[:-1]]
    cases = {f"ours {number}": case for number, case in enumerate(ours)}
    cases |= {f"theirs {number}": case for number, case in enumerate(theirs)}
    turns = {name: partial(case.step, images, labels, steps) for name, case in cases.items()}
    best = common.best_in_turns(turns, repeats, time.process_time)
    full = best[f"ours {len(ours) - 1}"]
    peaks = [case.peak(images, labels) for case in ours]
    costs = [common.flops_and_peak(method, case.module) for case in ours]
    for (_, predicted), peak in zip(costs, peaks, strict=True):
        if peak != predicted:
            raise SystemExit(f"predicted {predicted:,} bytes, metered {peak:,}")
    work = [flops for flops, _ in costs]
    size = [sum(p.numel() for p in case.module.parameters()) for case in ours]
    rows = []
    for number, blocks in enumerate(kept):
        cells = [f"{method.task.model.name}, {len(blocks)} of {len(every)}"]
        cells += [f"{values[number] / values[-1]:.2f}" for values in (size, work)]
        cells += [f"{best[f'ours {number}'] / full:.2f}", f"{peaks[number] / peaks[-1]:.2f}"]
        if blocks is kept[-1]:
            cells += [f"({1e3 * full / steps:.0f} ms)", f"({peaks[-1] / 1e6:.2f} MB)"]
        else:
            cells += [f"{best[f'theirs {number}'] / full:.2f}"]
            cells += [f"{theirs[number].peak(images, labels) / peaks[-1]:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Measure and print."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    chosen = parser.parse_args()
    names, repeats, steps = chosen.models, chosen.repeats, chosen.steps
    if chosen.smoke:
        names, repeats, steps = ["resnet18"], 1, 1
    torch.set_num_threads(1)
    print(common.head(*HEADS))
    for name in names:
        recipe = Recipe(batch=BATCH, momentum=0.0, weight_decay=0.0, norm="tracked")
        method = NeFL(Task(MODELS[name], recipe, IMAGE, CLASSES))
        for row in measure(method, published(name, "depth"), repeats, steps):
            print(row, flush=True)
    print(f"\n{common.load_average()}")


if __name__ == "__main__":
    main()
