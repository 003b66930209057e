"""What benchmarks share: their arguments, times in turns, and what they use of methods' insides.

With `--smoke` a benchmark does the least that runs all of its code, in seconds; its figures mean
nothing then. The tests run every benchmark so.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from sizewise.data.augment import Transform
from sizewise.exchange.plan import Plan
from sizewise.exchange.view import cut
from sizewise.families.base import Method
from sizewise.fleet.devices import Device
from sizewise.methods.nefl.scaling import Scaled
from sizewise.training.loop import Shard

Work = Callable[[], object]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the first line of a benchmark's docstring and knows `--smoke`."""
    found = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    found.add_argument("--smoke", action="store_true", help="in seconds, to see that it runs")
    return found


def head(*names: str) -> str:
    """Return the first two lines of a Markdown table."""
    return f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|"


def load_average() -> str:
    """Return what else the machine had to do."""
    return f"load average at the end: {os.getloadavg()[0]:.1f}"


def seconds(work: Work, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long some work takes."""
    start = clock()
    work()
    return clock() - start


def best_in_turns(
    work: Mapping[str, Work], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the shortest time of each, in seconds.

    All take turns, so that they meet the same machine; the first turn warms up and does not count.
    """
    turns = [
        {name: seconds(each, clock) for name, each in work.items()} for _ in range(1 + repeats)
    ]
    return {name: min(turn[name] for turn in turns[1:]) for name in work}


def random_shard(image: tuple[int, int, int], samples: int) -> Shard:
    """Return a device's random images and labels of ten classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, *image), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    transform = Transform("none", (0.5,) * image[0], (0.25,) * image[0])
    return Shard(images, labels, torch.arange(samples), transform)


# ---- inside methods: all that benchmarks use beyond what `docs/add-a-method.md` shows


def device_work(method: Method, device: Device, shard: Shard) -> tuple[Plan, Work]:
    """Return a device's plan in round 0, and the work of its round."""
    state = method.setup()
    plan = method.plan(state, device, 0)
    tensors = cut(state.tensors, method.submodels.view(plan.submodel))
    return plan, lambda: method.train(plan, tensors, shard, {})


def stage_names(plan: Plan) -> str:
    """Return what people call the stages of a plan."""
    return ", ".join(stage.work.label for stage in plan.stages)


def without_blocks(method: Method, kept: Sequence[int]) -> nn.Module:
    """Return a submodel of NeFL that has these blocks only."""
    return method.submodels.build(Scaled(blocks=tuple(kept)))


def block_paths(method: Method) -> Sequence[str]:
    """Return where the blocks of a method's model are."""
    return method.task.parts.blocks


def flops_and_peak(method: Method, module: nn.Module) -> tuple[int, int]:
    """Return the FLOPs and the predicted peak of a training step of a model."""
    cost = method.costs.of(module, method.main, method.task.stage())
    return cost.flops, cost.footprint.peak
