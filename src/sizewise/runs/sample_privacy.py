"""What runs with gradients clipped sample by sample spend, for the samples of each device.

The steps of one pass over a device's data have no sample in common, so a pass is one Gaussian
release for each sample, whatever the size of batches. A device spends one for each pass of each
stage that it was asked for; nothing is gained from who is asked, because the server knows.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sizewise.exchange.plan import Plan
from sizewise.fleet.devices import Fleet
from sizewise.privacy import accounting
from sizewise.steps.recipe import Recipe


def added(passes: Mapping[str, int], plans: Iterable[Plan]) -> dict[str, int]:
    """Return the passes of each device, by its number, with those of a round's plans."""
    found = dict(passes)
    for plan in plans:
        number = str(plan.device)
        found[number] = found.get(number, 0) + sum(stage.epochs for stage in plan.stages)
    return found


def spent(passes: Mapping[str, int], recipe: Recipe, fleet: Fleet, rounds: int) -> dict[str, Any]:
    """Return the epsilon of each class of devices, that of its samples which spent the most."""
    most: dict[str, int] = {}
    for number, count in passes.items():
        group = fleet.device(int(number), max(rounds - 1, 0)).group
        most[group] = max(count, most.get(group, 0))
    noise, delta = recipe.sample_noise or 0.0, recipe.sample_delta
    found = {count: accounting.epsilon({(1.0, noise): count}, delta) for count in {*most.values()}}
    return {
        "epsilon": {group: found[count] for group, count in most.items()},
        "passes": most,
        "delta": delta,
        "noise": noise,
        "repeatable": recipe.sample_seed is not None,
    }
