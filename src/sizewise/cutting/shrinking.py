"""From kept channels to a view of the server's tensors, and to a real, smaller module.

`view` says where a narrow model's tensors live among the full model's. `shrink` makes that narrow
model out of any module, without its constructor: a copy that holds the cut tensors, in which layers
are told their new sizes (`resize`). `verification.verify` checks that the two belong together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sizewise.cutting import checking
from sizewise.cutting.groups import Channels, Kept
from sizewise.cutting.narrowing import drop_channels
from sizewise.cutting.sizes import Cut, follow, resize
from sizewise.cutting.tracer import Step
from sizewise.cutting.union_find import Array, Mask
from sizewise.errors import ModelError, SizewiseError
from sizewise.exchange.view import Index, TensorSlice
from sizewise.torch_tools.copying import copied, remake
from sizewise.torch_tools.dry_run import named_tensors
from sizewise.torch_tools.failures import reason

__all__ = ["resize", "shrink", "view"]


def view(channels: Channels, kept: Kept) -> dict[str, TensorSlice]:
    """Return where the tensors of a narrow model live among those of the full one.

    Args:
        channels: What `trace` found in the full model.
        kept: For each group, the kept channels.

    Returns:
        For each name in the model's `state_dict`, a place of the same name. Kept entries that are
        neighbours are a slice, so reading them copies nothing.

    Raises:
        ModelError: `kept` does not fit the groups.
    """
    mask = channels.mask(kept)
    return {
        name: TensorSlice(name, _index(channels.tensors[name], mask)) for name in channels.saved
    }


def _index(dims: tuple[Array, ...], mask: Mask) -> Index | None:
    parts = tuple(_part(mask[ids]) for ids in dims)
    return None if all(part == slice(None) for part in parts) else parts


def _part(kept: Mask) -> slice | Tensor:
    if kept.all():
        return slice(None)
    entries = np.flatnonzero(kept)
    start, stop = int(entries[0]), int(entries[-1]) + 1
    return slice(start, stop) if stop - start == len(entries) else torch.from_numpy(entries)


def shrink(model: nn.Module, channels: Channels, kept: Kept, *, check: bool = True) -> nn.Module:
    """Return a narrow copy of a model.

    Args:
        model: The full model; it is left as it was.
        channels: What `trace` found in it.
        kept: For each group, the kept channels.
        check: Compare the results of all operations of the narrow model with the shapes they must
            have, without data. It finds a forward that uses a stored number of channels, which
            could go wrong in silence.

    Raises:
        ModelError: `kept` does not fit the groups, the model cannot be copied, or the narrow copy
            fails the check.
    """
    mask = channels.mask(kept)
    names = {id(tensor): name for name, tensor in named_tensors(model)}

    def piece(tensor: Tensor) -> Tensor:
        name = names[id(tensor)]
        place = TensorSlice(name, _index(channels.tensors[name], mask))
        found = place.read({name: tensor.detach()})
        # Contiguous in any case: narrow channels-last convolutions corrupt memory on CPU.
        return found.clone(memory_format=torch.contiguous_format)

    def kept_of(path: str, name: str, dim: int) -> Mask:
        return mask[channels.tensors[f"{path}.{name}" if path else name][dim]]

    small = copied(model, piece)
    with _still(small), _still(model):
        remake(small)
        for (path, narrow), full in zip(small.named_modules(), model.modules(), strict=True):
            _resize(Cut(narrow, full, partial(kept_of, path)), path or type(model).__name__)
        for step in (step for steps in channels.passes.values() for step in steps):
            _resize_norm(small, model, step, mask)
    if channels.loose:
        drop_channels(small, channels.broadcasts)
    if check:
        checking.check(small, channels, mask)
    return small


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Keep weights that are computed, as in spectral norm, from changing when one looks at them."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


# ---- layers that store their sizes


def _resize(cut: Cut, path: str) -> None:
    """Update a module's sizes; raise ModelError, with its path, if that fails."""
    try:
        follow(cut)
    except SizewiseError as error:
        raise ModelError(f"{path} cannot be cut so: {error}") from error
    except Exception as error:
        raise ModelError(
            f"{path} cannot be told its new sizes ({reason(error)}); see what "
            f"sizewise.cutting.resize does for {type(cut.full).__name__}"
        ) from error


def _resize_norm(small: nn.Module, model: nn.Module, step: Step, mask: Mask) -> None:
    """Update the sizes of a norm that may have no tensor to read them off."""
    if not step.operation.startswith("native_") and step.over is None:
        return
    norm, full = small.get_submodule(step.module), model.get_submodule(step.module)
    shape = step.cut_shape(mask)
    if step.over is not None:
        if "normalized_shape" in vars(norm):  # An RMS norm, of torch or of timm.
            vars(norm)["normalized_shape"] = (int(mask[step.over].sum()),)
    elif isinstance(norm, nn.LayerNorm):
        norm.normalized_shape = shape[-len(norm.normalized_shape) :]
    elif isinstance(norm, nn.GroupNorm) and isinstance(full, nn.GroupNorm):
        norm.num_channels = shape[1]
        norm.num_groups = full.num_groups * norm.num_channels // full.num_channels
    elif isinstance(norm, _NormBase) and isinstance(full, _NormBase):
        # An instance norm has the images of a batch side by side.
        norm.num_features = full.num_features * shape[1] // step.shape[1]
