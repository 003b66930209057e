"""From kept channels to a view of the server's tensors, and to a real, smaller module.

`view` says where a narrow model's tensors live among the full model's. `shrink` makes that narrow
model out of any module, without its constructor: a copy that holds the cut tensors, in which layers
are told their new sizes (`resize`). `verification.verify` checks that the two belong together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import singledispatch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sizewise.cutting import checking
from sizewise.cutting.channels import Channels, Kept
from sizewise.cutting.narrowing import drop_channels
from sizewise.cutting.tracer import Mask, Step
from sizewise.cutting.union_find import Array
from sizewise.errors import ModelError, SizewiseError
from sizewise.exchange.view import Index, TensorSlice
from sizewise.torch_tools.copying import copied, remake
from sizewise.torch_tools.dry_run import named_tensors
from sizewise.torch_tools.failures import reason


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

    small = copied(model, piece)
    with _still(small), _still(model):
        remake(small)
        for (path, narrow), full in zip(small.named_modules(), model.modules(), strict=True):
            _resize(narrow, full, path or type(model).__name__)
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


def _resize(narrow: nn.Module, full: nn.Module, path: str) -> None:
    """Update a module's sizes; raise ModelError, with its path, if that fails."""
    try:
        resize(narrow, full)
    except SizewiseError as error:
        raise ModelError(f"{path} cannot be cut so: {error}") from error
    except Exception as error:
        raise ModelError(
            f"{path} cannot be told its new sizes ({reason(error)}); see what "
            f"sizewise.cutting.resize does for {type(full).__name__}"
        ) from error


def _resize_norm(small: nn.Module, model: nn.Module, step: Step, mask: Mask) -> None:
    """Update the sizes of a norm that may have no tensor to read them off."""
    if not step.operation.startswith("native_"):
        return
    norm, full = small.get_submodule(step.module), model.get_submodule(step.module)
    shape = step.cut_shape(mask)
    if isinstance(norm, nn.LayerNorm):
        norm.normalized_shape = shape[-len(norm.normalized_shape) :]
    elif isinstance(norm, nn.GroupNorm) and isinstance(full, nn.GroupNorm):
        norm.num_channels = shape[1]
        norm.num_groups = full.num_groups * norm.num_channels // full.num_channels
    elif isinstance(norm, _NormBase) and isinstance(full, _NormBase):
        # An instance norm has the images of a batch side by side.
        norm.num_features = full.num_features * shape[1] // step.shape[1]


@singledispatch
def resize(narrow: nn.Module, full: nn.Module) -> None:
    """Update what a module stores about its sizes, after its tensors were cut.

    Modules that read sizes off their tensors need nothing. Teach it others with
    `@resize.register(MyLayer)`; modules inside a module come after it. Factors such as the scale
    of attention are no sizes and stay as they are stored.

    Args:
        narrow: A copy of `full` that holds the cut tensors; changed in place.
        full: The module in the full model.
    """
    # Attention in Hugging Face's models, by what it calls its parts and sizes: these are many
    # classes, in a library that is not always installed. The number of heads stays.
    for name in ("query", "q_proj", "q_lin"):
        cut, whole = getattr(narrow, name, None), getattr(full, name, None)
        if isinstance(cut, nn.Linear) and isinstance(whole, nn.Linear):
            for size in ("attention_head_size", "all_head_size", "head_dim"):
                if isinstance(stored := vars(full).get(size), int):
                    vars(narrow)[size] = stored * len(cut.weight) // len(whole.weight)


@resize.register
def _(narrow: nn.Linear, full: nn.Linear) -> None:
    narrow.out_features, narrow.in_features = narrow.weight.shape


@resize.register
def _(narrow: _ConvNd, full: _ConvNd) -> None:
    if full.groups > 1:  # Whole groups are dropped, and with them their share of the outputs.
        narrow.groups = full.groups * narrow.weight.shape[0] // full.weight.shape[0]
    narrow.out_channels = narrow.weight.shape[0]
    narrow.in_channels = narrow.weight.shape[1] * narrow.groups


@resize.register
def _(narrow: _ConvTransposeNd, full: _ConvTransposeNd) -> None:
    # Groups of these are never cut.
    narrow.in_channels = narrow.weight.shape[0]
    narrow.out_channels = narrow.weight.shape[1] * narrow.groups


@resize.register
def _(narrow: nn.Embedding, full: nn.Embedding) -> None:
    narrow.num_embeddings, narrow.embedding_dim = narrow.weight.shape


@resize.register
def _(narrow: nn.MultiheadAttention, full: nn.MultiheadAttention) -> None:
    outer, inner = narrow.out_proj.weight.shape
    if outer != inner:
        raise ModelError(
            f"nn.MultiheadAttention needs heads that add up to its embedding, but {outer} "
            f"dimensions and {narrow.num_heads} heads of {inner // narrow.num_heads} would be "
            "kept; choose a ratio at which both are equal"
        )
    narrow.embed_dim = narrow.kdim = narrow.vdim = outer
    narrow.head_dim = outer // narrow.num_heads
