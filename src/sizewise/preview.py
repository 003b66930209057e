"""What a run would do: for each device class its piece, its bytes and its work. Trains nothing."""

from typing import Any

from sizewise.config import Config
from sizewise.errors import BudgetTooSmall
from sizewise.session import prepare
from sizewise.training import trained
from sizewise.view import cut, size_in_bytes


def rows(config: Config) -> list[dict[str, Any]]:
    """Return one row for each device class, as `sizewise plan --json` prints it."""
    setting = prepare(config)
    method, recipe = setting.method, config.recipe
    state = method.setup()
    samples = int(setting.partition.sizes().float().mean())
    result = []
    for device, round_index, count in setting.fleet.classes():
        row: dict[str, Any] = {"group": device.group, "devices": count, "budget": device.memory}
        try:
            plan = method.plan(state, device, round_index)
        except BudgetTooSmall as error:
            result.append({**row, "predicted": error.needed, "refused": str(error)})
            continue
        steps = -(-samples // recipe.batch)
        costs = [method.footprint(plan.piece, stage) for stage in plan.stages]
        up = trained(method.module(plan.piece), plan.stages)
        row |= {
            "size": plan.piece.size,
            "predicted": plan.predicted,
            "stages": [
                {"name": stage.name, "epochs": stage.epochs, "bytes": vars(cost)}
                for stage, cost in zip(plan.stages, costs, strict=True)
            ],
            "bytes_down": size_in_bytes(cut(state.tensors, method.view(plan.piece))),
            "bytes_up": size_in_bytes(up),
            "steps": sum(stage.epochs for stage in plan.stages) * steps,
            "flops": sum(
                method.flops_per_sample(plan.piece, stage) * stage.epochs * samples
                for stage in plan.stages
            ),
            "refused": None,
        }
        result.append(row)
    return result
