"""What layers and arithmetic do to labels: one short rule per kind of operation.

A rule is called after the operation ran on meta tensors, with its result and its arguments. It
unifies labels of what comes in and labels what comes out. Pointwise operations need no rule of
their own, torch tags them; an operation that has none fixes what it reads, see `unknown`.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from sizewise.labels import Array, Labels, Rules, spread, varying

RULES = Rules()

# Pointwise in effect, though torch does not tag them.
POINTWISE = frozenset(
    {
        *("hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "masked_fill", "_prelu_kernel"),
        *("copy", "_to_copy", "detach", "alias", "lift_fresh", "native_dropout", "bernoulli"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    }
)
# Their results hold no channels, whatever tensor they take the type and device from.
FACTORIES = frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"})


def first(out: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the main result of an operation that may return several."""
    return out if isinstance(out, Tensor) else out[0]


def unknown(labels: Labels, tensors: Sequence[Tensor]) -> None:
    """Fix all that an operation without a rule reads: never wrong, only less to cut."""
    for tensor in tensors:
        for factor in labels.of(tensor):
            labels.fix(factor, "is not understood; the channels it reads stay whole")


def pointwise(labels: Labels, out: Tensor, tensors: Sequence[Tensor]) -> None:
    """Tie tensors that are broadcast together to the shape of `out`."""
    labels.put(out, paired(labels, tensors, range(out.ndim), out.ndim))


def paired(
    labels: Labels, tensors: Sequence[Tensor], dims: Collection[int], rank: int
) -> list[Array]:
    """Tie tensors to each other along some dimensions, entry by entry.

    Args:
        labels: The labels so far.
        tensors: Of `rank` dimensions, or fewer, which broadcast.
        dims: The dimensions along which they are paired, counted from 0 in `rank`.
        rank: Number of dimensions.

    Returns:
        Factors over these dimensions that all tensors agree on.
    """
    operands = [tensor for tensor in tensors if tensor.ndim]
    for dim in dims:
        present = [t for t in operands if dim >= rank - t.ndim and t.shape[dim - rank] > 1]
        if any(not _labelled(labels, t, dim - rank) for t in present):
            for tensor in present:
                labels.keep_whole(tensor, dim - rank)
    merged: list[Array] = []
    for tensor in operands:
        for factor in labels.of(tensor):
            factor = factor.reshape((1,) * (rank - tensor.ndim) + factor.shape)
            if not set(varying(factor)) <= set(dims):
                continue
            overlapping = [m for m in merged if set(varying(m)) & set(varying(factor))]
            for other in overlapping:
                labels.union(factor, other)
            if not overlapping:
                merged.append(factor)
    return merged


def _labelled(labels: Labels, tensor: Tensor, dim: int) -> bool:
    return any(factor.shape[dim] > 1 for factor in labels.of(tensor))


@RULES.add("convolution")
def _convolution(
    labels: Labels,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
) -> None:
    for dim in range(2, x.ndim):
        labels.keep_whole(x, dim)
        labels.keep_whole(weight, dim)
    channels = labels.along(x, 1)
    if transposed:
        inputs, outputs = labels.along(weight, 0), labels.along(weight, 1)
    else:
        outputs, inputs = labels.along(weight, 0), labels.along(weight, 1)
    if groups == 1:
        labels.meet(inputs, channels)
    elif transposed:
        why = "is a grouped transposed convolution; the channels it reads stay whole"
        for side in (inputs, outputs, channels):
            if side is not None:
                labels.fix(side, why)
        outputs = None
    else:
        # Whole groups are dropped, so a group of inputs and its outputs are one channel. Depthwise
        # convolution is the case of one input per group.
        if inputs is not None:
            labels.fix(inputs)
        by_group = [None if s is None else s.reshape(groups, -1) for s in (outputs, channels)]
        for side in by_group:
            if side is not None:
                labels.union(side, side[:, :1])
        labels.meet(*(None if side is None else side[:, 0] for side in by_group))
    if bias is not None:
        labels.meet(labels.along(bias, 0), outputs)
    labels.put(out, [] if outputs is None else [spread(outputs, 1, out.ndim)])


@RULES.add("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def _batch_norm(labels: Labels, out: Any, x: Tensor, *args: Any) -> None:
    channels = labels.along(x, 1)
    for tensor in args[:4]:
        if isinstance(tensor, Tensor):
            labels.meet(labels.along(tensor, 0), channels)
    labels.put(first(out), labels.of(x))


@RULES.add("native_layer_norm")
def _layer_norm(
    labels: Labels,
    out: Any,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    affine = [tensor for tensor in (weight, bias) if tensor is not None]
    if len(shape) == 1:
        channels = labels.along(x, -1)
        for tensor in affine:
            labels.meet(labels.along(tensor, 0), channels)
    else:
        for dim in range(1, len(shape) + 1):
            for tensor in (x, *affine):
                labels.keep_whole(tensor, -dim, "normalises several dimensions; they stay whole")
    labels.put(first(out), labels.of(x))


@RULES.add("native_group_norm")
def _group_norm(
    labels: Labels,
    out: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> None:
    for dim in range(2, x.ndim):
        labels.keep_whole(x, dim)
    found = labels.along(x, 1)
    if found is not None:
        # Whole groups are dropped, so that the statistics of the others stay what they are.
        by_group = found.reshape(groups, -1)
        if groups == 1:
            labels.fix(found, "normalises all channels together; they stay whole")
        labels.union(by_group, by_group[:, :1])
    for tensor in (weight, bias):
        if tensor is not None:
            labels.meet(labels.along(tensor, 0), found)
    labels.put(first(out), labels.of(x))


@RULES.add("embedding")
def _embedding(labels: Labels, out: Tensor, weight: Tensor, *args: Any) -> None:
    labels.keep_whole(weight, 0)
    features = labels.along(weight, 1)
    labels.put(out, [] if features is None else [spread(features, -1, out.ndim)])


def _contract(labels: Labels, out: Tensor, left: Tensor, right: Tensor, letters: str) -> None:
    """Label a product written as in einsum, e.g. "mk,kn->mn"."""
    of_left, of_right, of_out = re.split(",|->", letters)
    # Batch dimensions come last: where heads are one, asking for the entries inside them first
    # decides that these are cut and the heads kept.
    batch = set(of_left) & set(of_right) & set(of_out)
    order = sorted(set(of_left + of_right), key=lambda letter: (letter in batch, letter))
    found: dict[str, Array | None] = {}
    for letter in order:
        sides = [
            labels.along(tensor, names.index(letter))
            for tensor, names in ((left, of_left), (right, of_right))
            if letter in names
        ]
        if len(sides) == 2:
            labels.meet(sides[0], sides[1])
        found[letter] = sides[0] if len(sides) == 1 or sides[1] is not None else None
    factors = [(found[letter], dim) for dim, letter in enumerate(of_out)]
    labels.put(out, [spread(f, dim, out.ndim) for f, dim in factors if f is not None])


@RULES.add("mm")
def _mm(labels: Labels, out: Tensor, left: Tensor, right: Tensor) -> None:
    _contract(labels, out, left, right, "mk,kn->mn")


@RULES.add("bmm")
def _bmm(labels: Labels, out: Tensor, left: Tensor, right: Tensor) -> None:
    _contract(labels, out, left, right, "bmk,bkn->bmn")


@RULES.add("addmm", "baddbmm")
def _addmm(labels: Labels, out: Tensor, bias: Tensor, left: Tensor, right: Tensor) -> None:
    (_mm if left.ndim == 2 else _bmm)(labels, out, left, right)
    pointwise(labels, out, [bias, out])


@RULES.add("linear")
def _linear(
    labels: Labels, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    rows = "abcdefgh"[: x.ndim - 1]
    _contract(labels, out, x, weight, f"{rows}k,nk->{rows}n")
    if bias is not None:
        pointwise(labels, out, [bias, out])
