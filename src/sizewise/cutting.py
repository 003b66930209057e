"""From kept channels to a view of the server's tensors, and to a real, smaller module.

`view` says where a narrow model's tensors live among the full model's. `shrink` makes that narrow
model out of any module, without its constructor: a copy that holds the cut tensors, in which layers
are told their new sizes (`resize`). `sizewise.masking.verify` checks that the two belong together.
"""

import copy
import math
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sizewise.channels import Channels, Kept, Mask
from sizewise.dispatch import DispatchMode
from sizewise.dry_run import computed, named_tensors, on_meta, run
from sizewise.errors import ModelError
from sizewise.labels import Array
from sizewise.layer_rules import first
from sizewise.narrowing import drop_channels
from sizewise.view import Index, Slot


def view(channels: Channels, kept: Kept) -> dict[str, Slot]:
    """Return where the tensors of a narrow model live among those of the full one.

    Args:
        channels: What `trace` found in the full model.
        kept: For each group, the kept channels.

    Returns:
        For each name in the model's `state_dict`, a slot of the same name. Kept entries that are
        neighbours are a slice, so reading them copies nothing.

    Raises:
        ModelError: `kept` does not fit the groups.
    """
    mask = channels.mask(kept)
    return {name: Slot(name, _index(channels.tensors[name], mask)) for name in channels.saved}


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
            have, in one pass without data. It finds a forward that uses a stored number of
            channels, which could go wrong in silence.

    Raises:
        ModelError: `kept` does not fit the groups, or the narrow copy fails the check.
    """
    mask = channels.mask(kept)
    # A memo that knows the cut tensors: the copy takes them, once for all names of a tied one, and
    # the large tensors are never copied.
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(model):
        if id(tensor) not in memo:
            piece = Slot(name, _index(channels.tensors[name], mask)).read({name: tensor.detach()})
            # Contiguous in any case: narrow channels-last convolutions corrupt memory on CPU.
            piece = piece.clone(memory_format=torch.contiguous_format)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(piece, tensor.requires_grad) if is_parameter else piece
    small = copy.deepcopy(model, memo)
    for narrow, full in zip(small.modules(), model.modules(), strict=True):
        resize(narrow, full)
    for step in channels.steps:
        if step.operation == "native_layer_norm":
            norm = small.get_submodule(step.module)
            if isinstance(norm, nn.LayerNorm):  # It may have no tensor to read its size off.
                norm.normalized_shape = step.cut_shape(mask)[-len(norm.normalized_shape) :]
    if channels.loose:
        for part in small.modules():  # Of each, because some run the parts of a model one by one.
            if next(part.children(), None) is not None or part is small:
                drop_channels(part)
    if check:
        _check(small, channels, mask)
    return small


# ---- layers that store their sizes


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
def _(narrow: _NormBase, full: _NormBase) -> None:
    tensor = narrow.weight if narrow.weight is not None else narrow.running_mean
    if tensor is not None:
        narrow.num_features = len(tensor)


@resize.register
def _(narrow: nn.GroupNorm, full: nn.GroupNorm) -> None:
    if narrow.weight is not None:
        narrow.num_channels = len(narrow.weight)
        narrow.num_groups = full.num_groups * narrow.num_channels // full.num_channels


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


# ---- the check


class _Recorder(DispatchMode):
    """Notes the shapes of all results that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self.shapes += [(kind, tuple(first(out).shape)) for kind in computed(func)]
        return out


def _check(small: nn.Module, channels: Channels, mask: Mask) -> None:
    """Raise ModelError unless every operation gives the shape that its channels predict."""
    advice = (
        "its forward may use a number of channels that it stored: read it off a tensor, or update "
        "it with sizewise.cutting.resize"
    )
    recorder, double = _Recorder(), on_meta(small)
    kind = next((t.dtype for _, t in named_tensors(small) if t.is_floating_point()), torch.float)
    inputs = (x.to(kind) if x.is_floating_point() else x for x in channels.inputs)
    try:
        with recorder:
            run(double, *inputs)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"{type(small).__name__} cannot run when it is cut ({reason}); {advice}"
        ) from error
    for step, (name, shape) in zip(channels.steps, recorder.shapes, strict=False):
        expected = step.cut_shape(mask)
        if name != step.operation or _rows(shape) != _rows(expected):
            raise ModelError(
                f"{type(small).__name__} goes another way when it is cut: expected "
                f"{step.operation} of shape {expected} in {step.module or 'it'}, got "
                f"{name} of shape {shape}; {advice}"
            )
    if len(channels.steps) != len(recorder.shapes):
        raise ModelError(
            f"{type(small).__name__} runs {len(recorder.shapes)} operations when it is cut instead "
            f"of {len(channels.steps)}; {advice}"
        )


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    # Leading dimensions may or may not be flattened for a product.
    return (math.prod(shape[:-1]), *shape[-1:])
