"""What a run would do: each device class's submodel, bytes and work. Trains nothing."""

from dataclasses import replace
from typing import Any

from sizewise.common.structure import plain
from sizewise.config import Config
from sizewise.data.dataset import Dataset
from sizewise.errors import BudgetTooSmall
from sizewise.exchange.plan import Plan
from sizewise.exchange.state import State
from sizewise.exchange.view import size_in_bytes, view_in_bytes
from sizewise.runs import picture
from sizewise.runs.cuts import Cuts
from sizewise.runs.merge_outlook import outlook
from sizewise.runs.preparation import Setting, checked, prepare
from sizewise.runs.untrained import untrained
from sizewise.steps.levers import NONE
from sizewise.training.loop import workload
from sizewise.training.task import Task


def rows(config: Config) -> list[dict[str, Any]]:
    """Return one row for each device class, as `sizewise plan --json` prints it."""
    return rows_and_cuts(config)[0]


def rows_and_cuts(
    config: Config, dataset: Dataset | None = None
) -> tuple[list[dict[str, Any]], Cuts | None]:
    """Return these rows, and what shrinks with the width if the method cuts the model.

    A dataset that is in memory already takes the place of what the config names.

    Raises:
        ModelError: The model cannot be cut.
    """
    setting = prepare(config, dataset)
    cuts = checked(setting.method)
    return rows_of(setting), cuts


def rows_of(setting: Setting, wishes: bool = True) -> list[dict[str, Any]]:
    """Return one row for each device class; also, as wishes, of those that lack the bytes."""
    state, blocks = setting.start, blocks_in_words(setting.method.task)
    full = picture.full_shapes(setting.method)
    names = picture.part_names(setting.method, state)
    merge, left = outlook(setting), untrained(setting)
    found = []
    for device, round_index, count in setting.fleet.classes():
        row: dict[str, Any] = {
            "group": device.group,
            "devices": count,
            "from_round": round_index + 1,
            "budget": device.memory,
            "blocks": blocks,
            "merge": None if merge is None else {**plain(merge), "said": str(merge)},
            "untrained": None if left is None else {**plain(left), "said": str(left)},
        }
        refused: BudgetTooSmall | None = None
        try:
            plan = setting.method.plan_upper_bound(state, device, round_index)
        except BudgetTooSmall as error:
            refused = error
            if not wishes:
                row |= {"predicted": error.needed, "stages": [], "parts": []}
                found.append({**row, "refused": str(error)})
                continue
            # What it would do: the plan of the same device without a budget.
            plan = setting.method.plan_upper_bound(state, replace(device, memory=None), round_index)
        work = work_of(setting, state, plan)
        if refused is None:
            work["parts"] = picture.parts(setting.method, state, plan, full, names)
        else:
            work |= {"predicted": refused.needed, "parts": [], "refused": str(refused)}
        found.append({**row, **work})
    return found


def blocks_in_words(task: Task) -> str | None:
    """Return which blocks a model is taken apart into; None if nobody has asked for any."""
    if not task.is_taken_apart:
        return None
    paths = task.parts.blocks
    count = f"{len(paths)} block{'' if len(paths) == 1 else 's'}"
    found = "" if task.model.anatomy else "; if they are others, name them in model.anatomy"
    span = "" if not paths else f", {' to '.join(dict.fromkeys((paths[0], paths[-1])))}"
    return f"taken apart into {count}{span}{found}"


def work_of(setting: Setting, state: State, plan: Plan) -> dict[str, Any]:
    """Return what a plan costs a device with as many samples as devices have in the mean."""
    method, recipe = setting.method, setting.config.recipe
    samples = int(setting.partition.sizes()[:SAMPLED].float().mean())
    view, copy = method.submodels.view(plan.submodel), method.submodels.copy(plan.submodel)
    actual = [copy.actual(stage) for stage in plan.stages]
    traffic = method.traffic(plan, samples)
    returned = copy.trained_names(actual) if traffic.returns else ()
    sent = {name: copy.tensors[name] for name in returned if name in view}
    stages = [
        {
            "name": stage.work.label,
            "levers": stage.levers.label,
            "epochs": stage.epochs / parts if (parts := stage.part[1]) > 1 else stage.epochs,
            "steps": steps,
            "flops": method.flops_per_sample(plan.submodel, stage) * seen,
            "bytes": plain(method.cost(plan.submodel, stage).footprint),
        }
        for stage in plan.stages
        for steps, seen in [workload(stage, samples, recipe)]
    ]
    least = plan.predicted
    if recipe.levers != ("none",):
        least = max(method.levers.least(plan.submodel, stage) for stage in plan.stages)
    return {
        "size": plan.submodel.label,
        "predicted": plan.predicted,
        "least": least,
        "bytes": max((stage["bytes"] for stage in stages), key=lambda parts: parts["peak"]),
        "stages": stages,
        "bytes_down": view_in_bytes(view, state.tensors) + size_in_bytes(traffic.down),
        "bytes_up": size_in_bytes(sent) + size_in_bytes(traffic.up),
        "steps": sum(stage["steps"] for stage in stages),
        "flops": sum(stage["flops"] for stage in stages),
        "levers": "; ".join(dict.fromkeys(s["levers"] for s in stages if s["levers"] != "none")),
        "more_flops": _more_flops(setting, plan),
        "refused": None,
    }


def _more_flops(setting: Setting, plan: Plan) -> float:
    """Return the FLOPs of a plan's steps over those of the same steps without levers."""
    cost, stages = setting.method.cost, plan.stages
    taken = sum(cost(plan.submodel, stage).flops for stage in stages)
    plain_steps = (replace(stage, levers=NONE) for stage in stages)
    return round(taken / max(1, sum(cost(plan.submodel, s).flops for s in plain_steps)), 3)


SAMPLED = 10_000
"""Devices whose shards are looked at for the mean number of samples."""
