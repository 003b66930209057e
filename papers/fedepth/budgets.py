"""Metered peaks of FeDepth against the budgets of its scenarios, in bytes that are enforced.

    python papers/fedepth/budgets.py

Every device class of Fair, Lack and Surplus takes the first steps of each of its stages on
CIFAR-shaped data, at batch 32 and 128, with every step held to its budget; then it runs the whole
model, part by part, within the same budget. Writes `budgets.md`.
"""

from pathlib import Path

import torch

from sizewise.data.augment import Transform
from sizewise.exchange.view import cut
from sizewise.fleet.devices import SCENARIOS, FleetConfig, make_fleet
from sizewise.methods import find
from sizewise.runs.preparation import bytes_of_ratio, bytes_of_share
from sizewise.steps.recipe import Recipe
from sizewise.training.low_memory_inference import LowMemoryInference
from sizewise.training.loop import Shard
from sizewise.training.task import ModelConfig, Task

IMAGE = (3, 32, 32)


def lines(scenario: str, name: str, batch: int) -> list[str]:
    """Return a line of the table for each device class."""
    task = Task(ModelConfig("preresnet20"), Recipe(batch=batch, max_steps=2), IMAGE, 10)
    fleet = make_fleet(
        FleetConfig(devices=4, per_round=4, scenario=scenario),
        lambda ratio: bytes_of_ratio(task, ratio),
        lambda share: bytes_of_share(task, share),
    )
    task = Task(
        task.model,
        task.recipe,
        IMAGE,
        10,
        budgets=fleet.budgets(),
        ratios=fleet.ratios(),
        enforce=True,
    )
    method = find(name)(task)
    state = method.setup()
    images = torch.randint(0, 256, (2 * batch, *IMAGE), dtype=torch.uint8)
    labels = torch.randint(0, 10, (2 * batch,))
    shard = Shard(
        images, labels, torch.arange(2 * batch), Transform("none", (0.5,) * 3, (0.2,) * 3)
    )
    found = []
    for device, _, _ in fleet.classes():
        plan = method.plan(state, device, 0)
        update = method.train(plan, cut(state.tensors, method.submodels.view(plan.submodel)), shard, {})
        model = task.build().eval()
        frugal = LowMemoryInference(model, task.anatomy(model), task.inputs(batch), device.memory or 0)
        frugal(torch.randn(batch, *IMAGE))
        figures = (device.memory, plan.predicted, update.peak_bytes, frugal.peak)
        if max(figure or 0 for figure in figures[1:]) > (device.memory or 0):
            raise SystemExit(f"over budget: {scenario} {device.group} {figures}")
        shown = " | ".join(f"{(figure or 0) / 1e6:.2f}" for figure in figures)
        size = plan.submodel.label.replace("|", "/")
        found.append(f"| {scenario} {device.group} | {batch} | {name} | {size} | {shown} |")
    return found


def main() -> None:
    """Measure all and write the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = "| class | batch | method | trains | budget MB | predicted | metered | inference |"
    table = [head, "|---|---|---|---|---|---|---|---|"]
    for scenario in SCENARIOS:
        for batch in (32, 128):
            for name in ("fedepth", "m-fedepth"):
                table += lines(scenario, name, batch)
                print("\n".join(table[-4:]), flush=True)
    Path(__file__).with_suffix(".md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
