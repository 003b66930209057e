"""Metered peaks of FeDepth against the budgets of its scenarios, in bytes that are enforced.

    python papers/fedepth/budgets.py [--smoke]

Every device class of Fair, Lack and Surplus takes the first steps of each of its stages on
CIFAR-shaped data, at batch 32 and 128, with every step held to its budget; then it runs the whole
model, part by part, within the same budget. Writes `budgets.paper.md`.
"""

from dataclasses import replace
from itertools import product

import torch

import shared
from shared import common, inside
from sizewise.data.augment import Transform
from sizewise.fleet.devices import SCENARIOS, FleetConfig
from sizewise.fleet.making import make_fleet
from sizewise.methods import find
from sizewise.runs.preparation import bytes_of_ratio, bytes_of_share
from sizewise.steps.recipe import Recipe
from sizewise.training.loop import Shard
from sizewise.training.low_memory_inference import LowMemoryInference
from sizewise.training.task import ModelConfig, Task


def lines(scenario: str, name: str, batch: int, image: tuple[int, int, int]) -> list[str]:
    """Return a line of the table for each device class."""
    task = Task(ModelConfig("preresnet20"), Recipe(batch=batch, max_steps=2), image, 10)
    fleet = make_fleet(
        FleetConfig(devices=4, per_round=4, scenario=scenario),
        lambda ratio: bytes_of_ratio(task, ratio),
        lambda share: bytes_of_share(task, share),
    )
    task = replace(task, budgets=fleet.budgets(), ratios=fleet.ratios(), enforce=True)
    method = find(name)(task)
    state = method.setup()
    images = torch.randint(0, 256, (2 * batch, *image), dtype=torch.uint8)
    labels = torch.randint(0, 10, (2 * batch,))
    transform = Transform("none", (0.5,) * 3, (0.2,) * 3)
    shard = Shard(images, labels, torch.arange(2 * batch), transform)
    found = []
    for device, _, _ in fleet.classes():
        plan, update = inside.device_round(method, state, device, shard)
        model = task.build().eval()
        parts, inputs = task.anatomy(model), task.inputs(batch)
        inference = LowMemoryInference(model, parts, inputs, device.memory or 0)
        inference(torch.randn(batch, *image))
        figures = (device.memory, plan.predicted, update.peak_bytes, inference.peak)
        if max(figure or 0 for figure in figures[1:]) > (device.memory or 0):
            raise SystemExit(f"over budget: {scenario} {device.group} {figures}")
        shown = " | ".join(f"{(figure or 0) / 1e6:.2f}" for figure in figures)
        size = inside.label(plan).replace("|", "/")
        found.append(f"| {scenario} {device.group} | {batch} | {name} | {size} | {shown} |")
    return found


def main() -> None:
    """Measure all and write the table."""
    parser = common.parser(__doc__)
    common.add_smoke(parser)
    scale = common.SMOKE if parser.parse_args().smoke else "paper"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = ("budget MB", "predicted", "metered", "inference")
    table = common.table("class", "batch", "method", "trains", *figures)
    cases, image = list(product(SCENARIOS, (32, 128), ("fedepth", "m-fedepth"))), "paper"
    if scale == common.SMOKE:  # With a smaller batch, a sixth of the budget would hold no block.
        cases, image = [("fair", 16, "m-fedepth")], "mini"
    for scenario, batch, name in cases:
        found = lines(scenario, name, batch, shared.IMAGE[image])
        print("\n".join(found), flush=True)
        table += found
    common.write(table, common.target(__file__, scale, "md"))


if __name__ == "__main__":
    main()
