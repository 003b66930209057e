"""Updates in fewer bytes: what a device sends is how its tensors changed, rounded or thinned out.

Both sides know what the device received, so a change is enough:

    bf16   every entry of the change as bfloat16: half the bytes
    int8   every entry as one of 255 steps, up to the largest: a quarter
    topk   the largest entries alone, with their places: twice the share that is kept

What int8 and topk leave out is remembered by the device and added to its next change ("error
feedback": Seide et al. 2014, Stich et al. 2018), as long as it holds the same part of the model.

A tensor `name` travels as parts `name#...`; tensors of whole numbers travel as they are. The
engines carry parts like any tensors, so bytes are counted as sent; the federation puts them
together again before it checks and merges.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sizewise.common.structure import plain
from sizewise.errors import UpdateRefused
from sizewise.exchange.plan import Submodel, Update
from sizewise.exchange.rows import with_rows
from sizewise.exchange.view import Tensors, View
from sizewise.steps.recipe import Recipe

_PART, _KEPT = "#", "upload#"
_PARTS = {"bf16": ("change",), "int8": ("change", "scale"), "topk": ("place", "change")}


def encoded(update: Update, received: Tensors, device_state: Tensors, recipe: Recipe) -> Update:
    """Return an update as it is sent, with what the device has to remember for the next one.

    Args:
        update: What the device trained.
        received: What it had received, as it was before training.
        device_state: What it remembered, of this and of other kinds.
        recipe: Says how updates are sent.
    """
    if recipe.upload == "full":
        return update
    parts: dict[str, Tensor] = {}
    missed: dict[str, Tensor] = {}
    mark = _mark(update.plan.submodel)
    for name, tensor in update.tensors.items():
        if not tensor.is_floating_point():
            parts[name] = tensor
            continue
        base = received[name]
        rows = update.rows.get(name)
        kept = f"{mark}{name}"
        change = tensor.float() - (base if rows is None else base[list(rows)]).float()
        if rows is None and kept in device_state:
            change += device_state[kept]
        sent = _encode(change, recipe)
        parts |= {f"{name}{_PART}{part}": each for part, each in sent.items()}
        if rows is None and recipe.upload != "bf16":
            missed[kept] = change - _decode(sent, change.shape, recipe)
    return replace(update, tensors=parts, device_state={**update.device_state, **missed})


def kept(received: Tensors, recipe: Recipe) -> Tensors:
    """Return what a device received, safe from training in place, if its update needs it."""
    if recipe.upload == "full":
        return {}
    return {name: tensor.clone() for name, tensor in received.items()}


def own_state(device_state: Tensors) -> dict[str, Tensor]:
    """Return what a device remembers but for what its updates left out: that of its method."""
    return {name: t for name, t in device_state.items() if not name.startswith(_KEPT)}


def decoded(update: Update, view: View, tensors: Tensors, recipe: Recipe) -> Update:
    """Return an update with whole tensors again.

    Args:
        update: What a device sent; not to be trusted.
        view: The view its plan gave it.
        tensors: The server's tensors.
        recipe: Says how updates are sent.

    Raises:
        UpdateRefused: It was not sent in this way.
    """
    if recipe.upload == "full":
        return update
    narrowed = with_rows(view, update.rows, tensors)
    groups: dict[str, dict[str, Tensor]] = {}
    for full, tensor in update.tensors.items():
        name, _, part = full.rpartition(_PART) if _PART in full else (full, "", "")
        if name not in narrowed:
            raise UpdateRefused(f"tensor {full!r:.99} was never sent to this device")
        groups.setdefault(name, {})[part] = tensor
    found: dict[str, Tensor] = {}
    for name, parts in groups.items():
        place = narrowed[name]
        whole = not tensors[place.name].is_floating_point()
        expected = ("",) if whole else _PARTS[recipe.upload]
        if parts.keys() != set(expected):
            raise UpdateRefused(
                f"tensor {name!r:.99} came as {sorted(parts)!r:.99}, expected {sorted(expected)}"
            )
        if whole:
            found[name] = parts[""]
            continue
        base = place.read(tensors)
        try:
            change = _decode(parts, base.shape, recipe)
        except UpdateRefused as error:
            raise UpdateRefused(f"tensor {name!r:.99}: {error}") from None
        found[name] = (base.float() + change).to(base.dtype)
    return replace(update, tensors=found)


def base_name(full: str) -> str:
    """Return the name of the tensor that a part belongs to."""
    return full.rpartition(_PART)[0] if _PART in full else full


def _mark(submodel: Submodel) -> str:
    """Return what begins the names of what is remembered for a submodel, and for no other."""
    text = json.dumps(plain(submodel), sort_keys=True)
    return f"{_KEPT}{hashlib.sha256(text.encode()).hexdigest()[:16]}#"


def _count(numel: int, recipe: Recipe) -> int:
    return math.ceil(numel * recipe.upload_share)


def _encode(change: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    if recipe.upload == "bf16":
        return {"change": change.bfloat16()}
    if recipe.upload == "int8":
        scale = (change.abs().amax() / 127 if change.numel() else torch.zeros(())).reshape(1)
        steps = (change / scale).nan_to_num(0.0) if scale > 0 else torch.zeros_like(change)
        # A change that is not finite stays so: the server refuses it, with the tensor's name.
        return {"change": steps.round().clamp(-127, 127).to(torch.int8), "scale": scale}
    flat = change.reshape(-1)
    place = flat.abs().topk(_count(flat.numel(), recipe)).indices.sort().values
    return {"place": place.to(torch.int32), "change": flat[place]}


def _decode(parts: Mapping[str, Tensor], shape: Any, recipe: Recipe) -> Tensor:
    """Return the change that parts stand for; raise UpdateRefused if they are not of its shape."""
    shape = tuple(shape)
    if recipe.upload == "bf16":
        return _fit(parts["change"], torch.bfloat16, shape).float()
    if recipe.upload == "int8":
        scale = _fit(parts["scale"], torch.float32, (1,))
        if not 0 <= float(scale) < math.inf:
            raise UpdateRefused(f"its scale is {float(scale)}, and cannot be")
        return _fit(parts["change"], torch.int8, shape).float() * scale
    count = (_count(math.prod(shape), recipe),)
    place, change = (
        _fit(parts["place"], torch.int32, count).long(),
        _fit(parts["change"], torch.float32, count),
    )
    if count[0] and not (place[0] >= 0 and place[-1] < math.prod(shape) and rising(place)):
        raise UpdateRefused("its places are not distinct places of it, in order")
    return torch.zeros(math.prod(shape)).index_copy(0, place, change).reshape(shape)


def rising(places: Tensor) -> bool:
    """Return whether each number is above the one before."""
    return bool((places[1:] > places[:-1]).all())


def _fit(part: Tensor, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if part.dtype != kind or tuple(part.shape) != shape:
        raise UpdateRefused(
            f"a part is {part.dtype} of shape {tuple(part.shape)}, expected {kind} of shape {shape}"
        )
    return part
