"""Time of one round of a FeDepth device over end-to-end training of the same model.

    python benchmarks/fedepth.py [--epochs N] [--repeats N]

PreResNet-20 on CIFAR-shaped images, 256 of them, batch 32, one thread. The device has a sixth of
the paper's budget and trains six runs of blocks, 1 | 2 | 3 | 4 | 5-6 | 7-9, for `--epochs` epochs
each. It is compared with as many epochs of all blocks at once, when frozen blocks are computed anew
for each batch (`fixed`) and when their outputs are kept (`buffered`). Runs alternate, so that all
meet the same machine; figures are ratios of the best times.
"""

import argparse
import time

import torch

from sizewise.data.augment import Transform
from sizewise.exchange.plan import Plan
from sizewise.exchange.view import cut
from sizewise.fleet.devices import Device
from sizewise.methods.fedepth import FeDepth
from sizewise.steps.recipe import Recipe
from sizewise.training.loop import Shard
from sizewise.training.task import ModelConfig, Task

IMAGE, SAMPLES = (3, 32, 32), 256
LIMIT = 1.3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe(lr=0.05, batch=32, epochs=chosen.epochs)
    task = Task(ModelConfig("preresnet20"), recipe, IMAGE, 10, ratios=(1 / 6, 1.0))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (SAMPLES, *IMAGE), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    transform = Transform("none", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    shard = Shard(images, labels, torch.arange(SAMPLES), transform)
    work: dict[str, tuple[FeDepth, Plan]] = {}
    for name, ratio in (("end to end", 1.0), ("fixed", 1 / 6), ("buffered", 1 / 6)):
        data = "fixed" if name == "end to end" else name
        method = FeDepth(task, FeDepth.Options(assign="ratio", data=data))  # type: ignore[arg-type]
        work[name] = method, method.plan(method.setup(), Device(0, "a", ratio=ratio), 0)
    print("stages:", ", ".join(stage.name for stage in work["buffered"][1].stages))
    best = dict.fromkeys(work, float("inf"))
    for _ in range(chosen.repeats):
        for name, (method, plan) in work.items():
            tensors = cut(method.setup().tensors, method.submodels.view(plan.submodel))
            start = time.perf_counter()
            method.train(plan, tensors, shard, {})
            best[name] = min(best[name], time.perf_counter() - start)
    print("| | seconds | ratio |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {seconds:.2f} | {seconds / best['end to end']:.2f} |")
    print(f"goal: buffered at most {LIMIT}")


if __name__ == "__main__":
    main()
