"""What a plan trains, part by part of the model: what a report draws."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sizewise.errors import ModelError
from sizewise.exchange.kept_apart import shared_name
from sizewise.exchange.plan import Plan
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.training.loop import learns

Shapes = Mapping[str, torch.Size]


def full_shapes(method: Method) -> Shapes:
    """Return the shapes of the model that was asked for; the server's own may be a narrow one."""
    return {name: tensor.shape for name, tensor in method.task.build().state_dict().items()}


def part_names(method: Method, state: State) -> Mapping[str, str]:
    """Return for each of the server's tensors the name of the part that it belongs to."""
    return {name: _part(method, name) for name in state.tensors}


def parts(
    method: Method, state: State, plan: Plan, full: Shapes, names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the model's parts in order: how much of each a device holds, and when it learns.

    Parts are the stem, the blocks and the head; in a model that has no such parts, its children.
    Other tensors of the server, such as heads of their own after some block, come last. Each part
    has its `name`, its `width` (the share of its channels that the device holds, 0 if none) and
    `stages` (the numbers of the stages, from 1, in which some of it learns).
    """
    copy, view = method.submodels.copy(plan.submodel), method.submodels.view(plan.submodel)
    ordered = _ordered(set(names.values()))
    held, whole = dict.fromkeys(ordered, 0.0), dict.fromkeys(ordered, 0)
    learning: dict[str, set[int]] = {part: set() for part in ordered}
    learnable = {name for name, _ in copy.module.named_parameters()}
    stages = [copy.actual(stage) for stage in plan.stages]
    for local, place in view.items():
        if local not in learnable or place.name not in names:
            continue
        part, stored = names[place.name], state.tensors[place.name].shape
        shape = full.get(shared_name(place.name), stored)
        shape = shape if len(shape) == len(stored) else stored
        held[part] += shape.numel() * _share(place.shape(state.tensors), shape)
        whole[part] += shape.numel()
        for number, stage in enumerate(stages, 1):
            if learns(local, stage.trainable):
                learning[part].add(number)
    return [
        {
            "name": part,
            "width": round(held[part] / whole[part], 4) if whole[part] else 0.0,
            "stages": sorted(learning[part]),
        }
        for part in ordered
    ]


def _part(method: Method, name: str) -> str:
    """Return the name of the part that a server tensor belongs to."""
    name = shared_name(name)  # What is kept apart for a submodel is of the same part.
    try:
        part = method.task.parts.part_of(name)
    except ModelError:
        return name.partition(".")[0]
    return f"block {part + 1}" if isinstance(part, int) else part


def _ordered(parts: set[str]) -> list[str]:
    """Return parts in the order of the model; those of no known place come last."""

    def place(part: str) -> tuple[int, int, str]:
        kind, _, number = part.partition(" ")
        known = {"stem": 0, "block": 1, "head": 2}
        return known.get(kind, 3), int(number) if number.isdecimal() else 0, part

    return sorted(parts, key=place)


def _share(kept: Sequence[int], full: Sequence[int]) -> float:
    """Return the share of its channels that is kept of a tensor: of the dimension cut most."""
    return min((k / f for k, f in zip(kept, full, strict=True) if f), default=1.0)
