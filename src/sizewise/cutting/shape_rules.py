"""What views, copies, pools and reductions do to labels; `layer_rules` has the rest.

A rule must hold for the narrower model too, which runs the same code on fewer channels. That is
why a constant offset into channels (`x[:, :8]`, a padding) fixes them, and why `chunk` ties the
parts to each other: only equal parts are cut at the right place again.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from sizewise.cutting.layer_rules import first, paired, unknown
from sizewise.cutting.union_find import FIXED, Labels, Rule, Rules, spread, varying
from sizewise.torch_tools.dry_run import tensors_in

RULES = Rules()


@RULES.add("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(labels: Labels, out: Tensor, x: Tensor, *args: Any) -> None:
    if out.numel() != x.numel():  # Another dtype of another width.
        unknown(labels, [x])
        return
    chunks = list(_chunks(x.shape, out.shape))
    factors = []
    for factor in labels.of(x):
        old, new = [1] * x.ndim, [1] * out.ndim
        for before, after in chunks:
            if any(factor.shape[dim] > 1 for dim in before):
                for dim in before:
                    old[dim] = x.shape[dim]
                for dim in after:
                    new[dim] = out.shape[dim]
        factors.append(np.broadcast_to(factor, old).reshape(new))
    labels.put(out, factors)
    for factor in labels.of(out):
        labels.split_later(factor)


def _chunks(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Pair runs of old and new dimensions that hold the same entries, each as short as can be."""
    i = j = 0
    while i < len(old) or j < len(new):
        start, stop = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while math.prod(old[start:i]) != math.prod(new[stop:j]):
            if math.prod(old[start:i]) < math.prod(new[stop:j]):
                i += 1
            else:
                j += 1
        yield list(range(start, i)), list(range(stop, j))


@RULES.add("permute")
def _permute(labels: Labels, out: Tensor, x: Tensor, dims: Sequence[int]) -> None:
    order = [dim % x.ndim for dim in dims]
    labels.put(out, [factor.transpose(order) for factor in labels.of(x)])


@RULES.add("transpose", "t")
def _transpose(labels: Labels, out: Tensor, x: Tensor, one: int = 0, other: int = -1) -> None:
    labels.put(out, [factor.swapaxes(one, other) for factor in labels.of(x)])


@RULES.add("unsqueeze")
def _unsqueeze(labels: Labels, out: Tensor, x: Tensor, dim: int) -> None:
    labels.put(out, [np.expand_dims(factor, dim % out.ndim) for factor in labels.of(x)])


@RULES.add("squeeze")
def _squeeze(
    labels: Labels, out: Tensor, x: Tensor, dims: int | Sequence[int] | None = None
) -> None:
    asked = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = tuple({dim % x.ndim for dim in asked if x.shape[dim] == 1})
    labels.put(out, [factor.squeeze(gone) for factor in labels.of(x)])


@RULES.add("expand")
def _expand(labels: Labels, out: Tensor, x: Tensor, *args: Any) -> None:
    lead = (1,) * (out.ndim - x.ndim)
    labels.put(out, [factor.reshape(lead + factor.shape) for factor in labels.of(x)])


@RULES.add("repeat")
def _repeat(labels: Labels, out: Tensor, x: Tensor, repeats: Sequence[int]) -> None:
    lead = (1,) * (out.ndim - x.ndim)
    factors = []
    for factor in labels.of(x):
        whole = factor.reshape(lead + factor.shape)
        times = [n if size > 1 else 1 for n, size in zip(repeats, whole.shape, strict=True)]
        factors.append(np.tile(whole, times))
    labels.put(out, factors)


@RULES.add("select")
def _select(labels: Labels, out: Tensor, x: Tensor, dim: int, index: int) -> None:
    labels.keep_whole(x, dim, "picks a channel by its number; the channels it reads stay whole")
    labels.put(out, [factor.squeeze(dim % x.ndim) for factor in labels.of(x)])


@RULES.add("unbind")
def _unbind(labels: Labels, out: Sequence[Tensor], x: Tensor, dim: int = 0) -> None:
    for index, part in enumerate(out):
        _select(labels, part, x, dim, index)


@RULES.add("slice")
def _slice(labels: Labels, out: Tensor, x: Tensor, dim: int = 0, *bounds: int | None) -> None:
    if out.shape != x.shape:
        labels.keep_whole(x, dim, "cuts channels at a fixed place; those it reads stay whole")
    labels.put(out, labels.of(x))


@RULES.add("split", "split_with_sizes", "unsafe_split", "unsafe_chunk")
def _split(
    labels: Labels, out: Sequence[Tensor], x: Tensor, size: int | Sequence[int], dim: int = 0
) -> None:
    dim %= x.ndim
    if len({part.shape[dim] for part in out}) > 1:
        labels.keep_whole(x, dim, "splits channels unequally; those it reads stay whole")
    for factor in labels.of(x):
        if factor.shape[dim] > 1:
            parts = np.split(factor, len(out), dim)
            for part in parts[1:]:
                labels.tie(part, parts[0])
    # What was unified is the same in every part.
    size_of_part = out[0].shape[dim]
    factors = [f.take(range(min(size_of_part, f.shape[dim])), dim) for f in labels.of(x)]
    for part_of_x in out:
        labels.put(part_of_x, factors)


@RULES.add("cat")
def _cat(labels: Labels, out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    dim %= out.ndim
    parts = [tensor for tensor in tensors if tensor.ndim == out.ndim]
    joined = []
    for part in parts:
        side = labels.along(part, dim)
        joined.append(np.full(part.shape[dim], FIXED, dtype=np.int64) if side is None else side)
    along = spread(np.concatenate(joined), dim, out.ndim)
    # Along the other dimensions the parts are paired, as in a sum.
    across = paired(labels, parts, [d for d in range(out.ndim) if d != dim], out.ndim)
    labels.put(out, [along, *across])


@RULES.add("stack")
def _stack(labels: Labels, out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    dim %= out.ndim
    dims = range(out.ndim - 1)
    factors = paired(labels, tensors, dims, out.ndim - 1)
    labels.put(out, [np.expand_dims(factor, dim) for factor in factors])


@RULES.add("constant_pad_nd", "reflection_pad2d", "replication_pad2d", "reflection_pad1d")
def _pad(labels: Labels, out: Tensor, x: Tensor, padding: Sequence[int], *args: Any) -> None:
    for dim in range(x.ndim):
        if out.shape[dim] != x.shape[dim]:
            labels.keep_whole(x, dim, "pads channels by a fixed number; those it reads stay whole")
    labels.put(out, labels.of(x))


# ---- mixing along dimensions


def _mixes(labels: Labels, out: Any, x: Tensor, dims: Sequence[int]) -> None:
    """Label an operation that mixes entries along some dimensions and keeps the shape's rank."""
    for dim in dims:
        labels.keep_whole(x, dim, "mixes channels; those it reads stay whole")
    labels.put(first(out), labels.of(x))


@RULES.add("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "flip", "index_select")
def _along_dims(labels: Labels, out: Any, x: Tensor, dims: int | Sequence[int], *args: Any) -> None:
    _mixes(labels, out, x, [dims] if isinstance(dims, int) else dims)


@RULES.add("roll")
def _roll(labels: Labels, out: Tensor, x: Tensor, shifts: object, dims: Sequence[int] = ()) -> None:
    _mixes(labels, out, x, dims or range(x.ndim))


def _reduced(x: Tensor, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the dimensions that a reduction takes away."""
    if dims is None or dims == []:
        return tuple(range(x.ndim))
    return tuple({dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)})


def _reduction(at: int = 0) -> Rule:
    """Return the rule of a reduction whose dimensions are the argument `at` after the tensor."""

    def apply(labels: Labels, out: Any, x: Tensor, *args: Any) -> None:
        dims = args[at] if len(args) > at else None
        if isinstance(dims, Tensor):  # The larger of two tensors goes by the same name.
            unknown(labels, [x, dims])
            return
        gone = _reduced(x, dims)
        for dim in gone:
            labels.keep_whole(x, dim, "mixes channels; those it reads stay whole")
        for result in tensors_in(out):
            kept = result.ndim == x.ndim
            labels.put(result, [f if kept else f.squeeze(gone) for f in labels.of(x)])

    return apply


_plain_mean = _reduction()


@RULES.add("mean")
def _mean(labels: Labels, out: Tensor, x: Tensor, dims: Any = None, *args: Any) -> None:
    gone = _reduced(x, dims)
    over = [factor for factor in labels.of(x) if varying(factor) == list(gone)]
    squares = x in labels.squares and x in labels.from_inputs and not labels.loud(x)
    if not over or not squares:
        _plain_mean(labels, out, x, dims)
        return
    # An RMS norm. As in a layer norm, its statistics are over the channels that exist.
    labels.averaged[out] = over[0].ravel()
    left = [factor for factor in labels.of(x) if varying(factor) != list(gone)]
    labels.put(out, [f if out.ndim == x.ndim else f.squeeze(gone) for f in left])


for _name in ("sum", "amax", "amin", "max", "min", "prod", "logsumexp"):
    RULES[_name] = _reduction()
for _name in ("var", "std", "var_mean", "std_mean"):
    RULES[_name] = _reduction()
RULES["linalg_vector_norm"] = _reduction(at=1)


@RULES.add("any")
def _any(
    labels: Labels, out: Tensor, x: Tensor, dims: int | Sequence[int] | None = None, *args: Any
) -> None:
    if labels.loud(x):
        RULES["sum"](labels, out, x, dims)
        return
    # A channel that is gone is a zero to what is left, and to `any` a zero is nothing.
    gone = _reduced(x, dims)
    left = [f for f in labels.of(x) if not set(varying(f)) & set(gone)]
    labels.put(out, [f if out.ndim == x.ndim else f.squeeze(gone) for f in left])


def _spatial(rank: int) -> Rule:
    """Return the rule of pooling and resampling over the last `rank` dimensions."""

    def apply(labels: Labels, out: Any, x: Tensor, *args: Any) -> None:
        _mixes(labels, out, x, [x.ndim - 1 - i for i in range(rank)])

    return apply


for _rank in (1, 2, 3):
    for _pool in ("avg_pool", "adaptive_avg_pool", "max_pool", "adaptive_max_pool"):
        RULES[f"{_pool}{_rank}d"] = RULES[f"_{_pool}{_rank}d"] = _spatial(_rank)
        RULES[f"{_pool}{_rank}d_with_indices"] = _spatial(_rank)
    RULES[f"upsample_nearest{_rank}d"] = _spatial(_rank)
RULES.update(
    upsample_linear1d=_spatial(1), upsample_bilinear2d=_spatial(2), upsample_bicubic2d=_spatial(2)
)
