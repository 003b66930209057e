"""What each lever saves and costs: bytes and FLOPs of a step, predicted, and its time, measured.

    python benchmarks/levers.py                    # four tables in Markdown, about ten minutes
    python benchmarks/levers.py cnn --repeats 30   # one of them
    python benchmarks/levers.py cnn --batch 128
    python benchmarks/levers.py --bytes --json     # without times, at once

Steps on one thread, at batch 32 unless told otherwise. In each repeat every choice of levers takes
one step, in an order that is drawn, so that all meet the same machine; a time is the median over
repeats, in seconds of the processor, over that of plain training. So is that of a bare PyTorch loop
over quarters of the batch, which is told on the way.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sizewise import models
from sizewise.common.heap import keep_freed
from sizewise.memory.prediction import Cost, cost
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import training_step

CLASSES, TOKENS, VOCABULARY = 10, 64, 8000


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    title: str
    build: Callable[[], nn.Module]
    recipe: Recipe
    text: bool = False
    size: int = 32

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return random inputs and labels."""
        labels = torch.randint(0, CLASSES, (self.size,))
        if self.text:
            return torch.randint(1, VOCABULARY, (self.size, TOKENS)), labels
        return torch.randn(self.size, 3, 32, 32), labels

    @property
    def levers(self) -> list[Levers]:
        """What is tried: parts of a half, a quarter, an eighth of the batch, and so on."""
        half, quarter, eighth, least = (self.size // parts for parts in (2, 4, 8, 16))
        return [
            NONE,
            Levers(micro_batch=half),
            Levers(micro_batch=quarter),
            Levers(micro_batch=eighth),
            Levers(checkpoint=True),
            Levers(step_in_backward=True),
            Levers(state="bfloat16"),
            Levers(activations="bfloat16"),
            Levers(checkpoint=True, step_in_backward=True),
            Levers(checkpoint=True, step_in_backward=True, state="bfloat16"),
            Levers(micro_batch=quarter, checkpoint=True),
            Levers(micro_batch=least, checkpoint=True, state="bfloat16"),
        ]


def _images(name: str) -> nn.Module:
    return models.build(name, classes=CLASSES, image=(3, 32, 32))


def _encoder() -> nn.Module:
    sizes = {"layers": 4, "hidden": 256, "heads": 4}
    data = {"image": (TOKENS,), "vocabulary": VOCABULARY, "classes": CLASSES}
    return models.build("encoder", args=sizes, **data)  # type: ignore[arg-type]


CASES = {
    "cnn": Case("PreResNet-20, 32x32, momentum", partial(_images, "preresnet20"), Recipe()),
    "resnet": Case("ResNet-18, 32x32, momentum", partial(_images, "resnet18"), Recipe()),
    "vit": Case(
        "ViT-Tiny, 32x32, patches of 4, AdamW",
        partial(_images, "vit_tiny"),
        Recipe(optimizer="adamw", lr=1e-3),
    ),
    "encoder": Case(
        "An encoder of 4 layers of 256, 64 tokens, AdamW",
        _encoder,
        Recipe(optimizer="adamw", lr=1e-3),
        text=True,
    ),
}


def predicted(case: Case, levers: Levers) -> Cost:
    """Return what a step takes."""
    inputs, labels = (tensor.to("meta") for tensor in case.batch())
    optimizer = partial(make_optimizer, case.recipe, lr=case.recipe.lr, levers=levers)
    step = partial(training_step, levers=levers)
    return cost(case.build(), inputs, labels, step=step, optimizer=optimizer)


def bare(case: Case) -> Callable[[], None]:
    """Return a step over quarters of a batch without sizewise: what the kernels themselves take."""
    module, (inputs, labels) = case.build().train(), case.batch()
    if case.recipe.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for some, wanted in zip(inputs.chunk(4), labels.chunk(4), strict=True):
            value = nn.functional.cross_entropy(module(some), wanted) / 4
            value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def times(case: Case, repeats: int) -> list[float]:
    """Return the median time of a step with each choice of levers, and of the bare one."""
    steps: list[Callable[[], object]] = []
    for levers in case.levers:
        module = case.build().train()
        optimizer = make_optimizer(case.recipe, [*module.parameters()], 1e-3, levers)
        steps.append(partial(training_step, module, optimizer, *case.batch(), levers=levers))
    steps.append(bare(case))
    taken: list[list[float]] = [[] for _ in steps]
    order = list(range(len(steps)))
    for repeat in range(repeats + 2):  # Two to warm up.
        random.Random(repeat).shuffle(order)  # noqa: S311  (what came before must not matter)
        for number in order:
            start = time.process_time()
            steps[number]()
            if repeat > 1:
                taken[number].append(time.process_time() - start)
    return [statistics.median(found) for found in taken]


def rows(case: Case, repeats: int) -> list[dict[str, Any]]:
    """Return what each choice of levers takes, beside plain training."""
    costs = [predicted(case, levers) for levers in case.levers]
    measured = times(case, repeats) if repeats else []
    if measured:
        ratio = measured[-1] / measured[0]
        print(f"{case.title}: a bare loop over quarters takes {ratio:.2f}", file=sys.stderr)
    return [
        {
            "levers": levers.label,
            "bytes": found.footprint.peak,
            "share": found.footprint.peak / costs[0].footprint.peak,
            "flops": found.flops / costs[0].flops,
            "time": measured[number] / measured[0] if measured else None,
        }
        for number, (levers, found) in enumerate(zip(case.levers, costs, strict=True))
    ]


def table(found: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = ["| levers | MB | of plain | FLOPs | time |", "|---|---|---|---|---|"]
    for row in found:
        clock = "" if row["time"] is None else f"{row['time']:.2f}"
        share, flops = f"{row['share']:.2f}", f"{row['flops']:.2f}"
        lines.append(
            f"| {row['levers']} | {row['bytes'] / 1e6:.2f} | {share} | {flops} | {clock} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--bytes", action="store_true", help="do not measure times")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="one model, one step of each")
    chosen = parser.parse_args()
    if chosen.smoke:
        chosen.cases, chosen.repeats = ["cnn"], 1
    torch.set_num_threads(1)
    keep_freed()  # As the processes of a run do.
    repeats = 0 if chosen.bytes else chosen.repeats
    found = {
        name: rows(replace(CASES[name], size=chosen.batch), repeats)
        for name in chosen.cases or CASES
    }
    if chosen.json:
        print(json.dumps(found, indent=1))
        return
    for name, case_rows in found.items():
        print(f"### {CASES[name].title}\n\n{table(case_rows)}\n")


if __name__ == "__main__":
    main()
