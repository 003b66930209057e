"""What channels last saves: the time of a training step in both layouts, and what `auto` takes.

    python benchmarks/layouts.py [--repeats N] [--smoke]

One thread. Steps of both layouts alternate, in an order that is drawn, and the fastest of each
counts, in seconds of the processor: others may be at work on the machine.
"""

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

import torch

from sizewise import models
from sizewise.common.heap import keep_freed
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import training_step
from sizewise.torch_tools.layout import Arrangement, arranged, laid_out

CASES = (
    ("cnn", 32, 50),
    ("preresnet20", 32, 32),
    ("preresnet20", 16, 32),
    ("resnet20", 32, 32),
    ("densenet22", 32, 16),
    ("resnet18", 32, 8),
    ("resnet18", 32, 32),
    ("resnet18", 16, 32),
)
CLASSES = 10


def step(name: str, pixels: int, batch: int, arrangement: Arrangement) -> Callable[[], object]:
    """Return a function that takes one training step of a fresh model."""
    module = models.build(name, classes=CLASSES, image=(3, pixels, pixels)).train()
    laid_out(module, arrangement)
    optimizer = make_optimizer(Recipe(), [*module.parameters()], 1e-3)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(CLASSES, (batch,))
    return partial(training_step, module, optimizer, images, labels)


def fastest(steps: list[Callable[[], object]], repeats: int) -> list[float]:
    """Return the least time of each step."""
    taken: list[list[float]] = [[] for _ in steps]
    for repeat in range(repeats + 1):  # One to warm up.
        for number in random.Random(repeat).sample(range(len(steps)), len(steps)):  # noqa: S311
            start = time.process_time()
            steps[number]()
            if repeat:
                taken[number].append(time.process_time() - start)
    return [min(times) for times in taken]


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="in seconds, to see that it runs")
    given = parser.parse_args()
    keep_freed()
    torch.set_num_threads(1)
    print("| model | pixels | batch | contiguous ms | channels last ms | ratio | `auto` |")
    print("|---|---|---|---|---|---|---|")
    for name, pixels, batch in CASES[: 1 if given.smoke else None]:
        both = [step(name, pixels, batch, Arrangement(last)) for last in (False, True)]
        one, other = fastest(both, 1 if given.smoke else given.repeats)
        module = models.build(name, classes=CLASSES, image=(3, pixels, pixels))
        auto = arranged(module, torch.randn(4, 3, pixels, pixels), "auto").channels_last
        kind = "channels last" if auto else "contiguous"
        print(f"| {name} | {pixels} | {batch} | {one * 1e3:.1f} | {other * 1e3:.1f} ", end="")
        print(f"| {other / one:.2f} | {kind} |", flush=True)


if __name__ == "__main__":
    main()
