"""Time of one round of a FeDepth device over end-to-end training of the same model.

    python benchmarks/fedepth.py [--epochs N] [--repeats N] [--smoke]

PreResNet-20 on CIFAR-shaped images, 256 of them, batch 32, one thread. The device has a sixth of
the paper's budget and trains six runs of blocks, 1 | 2 | 3 | 4 | 5-6 | 7-9, for `--epochs` epochs
each. It is compared with as many epochs of all blocks at once, when frozen blocks are computed anew
for each batch (`fixed`) and when their outputs are kept (`buffered`). Runs alternate, so that all
meet the same machine; figures are ratios of the best times.
"""

from typing import Literal

import torch

import common
from sizewise.fleet.devices import Device
from sizewise.methods.fedepth import FeDepth
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

IMAGE, SAMPLES = (3, 32, 32), 256
LIMIT = 1.3

Data = Literal["fixed", "buffered"]
CASES: dict[str, tuple[Data, float]] = {
    "end to end": ("fixed", 1.0),
    "fixed": ("fixed", 1 / 6),
    "buffered": ("buffered", 1 / 6),
}
"""What frozen blocks do, and the device's budget."""


def main() -> None:
    """Measure and print."""
    parser = common.parser(__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    epochs, repeats, samples = chosen.epochs, chosen.repeats, SAMPLES
    if chosen.smoke:
        epochs, repeats, samples = 1, 1, 32
    torch.set_num_threads(1)
    recipe = Recipe(lr=0.05, batch=32, epochs=epochs)
    task = Task(ModelConfig("preresnet20"), recipe, IMAGE, 10, ratios=(1 / 6, 1.0))
    shard = common.random_shard(IMAGE, samples)
    work: dict[str, common.Work] = {}
    for name, (data, ratio) in CASES.items():
        method = FeDepth(task, FeDepth.Options(assign="ratio", data=data))
        plan, work[name] = common.device_work(method, Device(0, "a", ratio=ratio), shard)
        print(f"{name}, stages: {common.stage_names(plan)}")
    best = common.best_in_turns(work, repeats)
    print(common.head("", "seconds", "ratio"))
    for name, seconds in best.items():
        print(f"| {name} | {seconds:.2f} | {seconds / best['end to end']:.2f} |")
    print(f"goal: buffered at most {LIMIT}")


if __name__ == "__main__":
    main()
