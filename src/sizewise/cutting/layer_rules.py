"""What layers and arithmetic do to labels: one short rule per kind of operation.

A rule is called after the operation ran on meta tensors, with its result and its arguments. It
unifies labels of what comes in and labels what comes out. Pointwise operations need no rule of
their own, torch tags them; an operation that has none fixes what it reads, see `unknown`.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from sizewise.cutting.union_find import PAIRED, Array, Labels, Rules, spread, varying

RULES = Rules()

# Pointwise in effect, though torch does not tag them.
POINTWISE = frozenset(
    {
        *("hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "masked_fill", "_prelu_kernel"),
        *("copy", "_to_copy", "detach", "alias", "lift_fresh", "native_dropout", "bernoulli"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    }
)
STATISTICS = "takes statistics over channels; those it reads stay whole"
LOUD = "multiplies channels that are not zero where they are dropped; they stay whole"

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
    _leave_tables(labels, tensors)
    labels.put(out, paired(labels, tensors, range(out.ndim), out.ndim))


def _leave_tables(labels: Labels, tensors: Sequence[Tensor]) -> None:
    """Fix a table that tells the entries inside heads apart: heads are then dropped as a whole.

    Positions rotate pairs of entries, and which are a pair is a matter of their place.
    """
    joint = {
        dim - factor.ndim
        for tensor in tensors
        if tensor not in labels.tables
        for factor in labels.of(tensor)
        for dim in varying(factor)
        if len(varying(factor)) > 1
    }
    for table in tensors:
        for factor in labels.of(table) if table in labels.tables else ():
            if joint & {dim - factor.ndim for dim in varying(factor)}:
                labels.fix(factor)


def paired(
    labels: Labels, tensors: Sequence[Tensor], dims: Collection[int], rank: int
) -> list[Array]:
    """Tie tensors to each other along some dimensions, entry by entry.

    Tensors have `rank` dimensions, counted from 0, or fewer, and then broadcast. Returns factors
    over the given dimensions that all tensors agree on.
    """
    operands = [tensor for tensor in tensors if tensor.ndim]
    for dim in dims:
        present = [t for t in operands if dim >= rank - t.ndim and t.shape[dim - rank] > 1]
        if not all(any(f.shape[dim - rank] > 1 for f in labels.of(t)) for t in present):
            for tensor in present:
                labels.keep_whole(tensor, dim - rank, _why(labels, tensor))
    merged: list[tuple[Array, str]] = []
    for tensor in operands:
        for factor in labels.of(tensor):
            factor = factor.reshape((1,) * (rank - tensor.ndim) + factor.shape)
            if not set(varying(factor)) <= set(dims):
                continue
            overlapping = [m for m in merged if set(varying(m[0])) & set(varying(factor))]
            for other, why in overlapping:
                labels.meet(factor, other, why=(_why(labels, tensor), why))
            if not overlapping:
                merged.append((factor, _why(labels, tensor)))
    return [factor for factor, _ in merged]


def _why(labels: Labels, tensor: Tensor) -> str:
    return PAIRED if tensor in labels.from_inputs else ""


@RULES.add("convolution")
def _convolution(
    labels: Labels, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any
) -> None:
    *_, transposed, _, groups = args
    for dim in range(2, x.ndim):
        labels.keep_whole(x, dim, "slides over channels; those it reads stay whole")
        labels.keep_whole(weight, dim)
    reads, gives = (0, 1) if transposed else (1, 0)  # Dimensions of the weight.
    if groups == 1:
        _quieten(labels, (x, 1), (weight, reads))
        labels.pair(weight, reads, x, 1)
        outputs = labels.along(weight, gives)
    elif transposed:
        why = "is a grouped transposed convolution; the channels it reads stay whole"
        for side in (labels.along(weight, 0), labels.along(weight, 1), labels.along(x, 1)):
            if side is not None:
                labels.fix(side, why)
        outputs = None
    else:
        outputs = _by_groups(labels, x, weight, groups)
    if bias is not None:
        labels.meet(labels.along(bias, 0), outputs, why=("", PAIRED))
    loud = labels.loud(weight) or (bias is not None and labels.loud(bias))
    labels.put(out, [] if outputs is None else [spread(outputs, 1, out.ndim)], loud)


def _by_groups(labels: Labels, x: Tensor, weight: Tensor, groups: int) -> Array | None:
    """Label a grouped convolution, of which whole groups are dropped; return its outputs' labels.

    A group of inputs and its outputs are one channel. Depthwise convolution is the case of one
    input per group.
    """
    labels.keep_whole(weight, 1)
    outputs, channels = labels.along(weight, 0), labels.along(x, 1)
    by_group = [None if s is None else s.reshape(groups, -1) for s in (outputs, channels)]
    for side in by_group:
        if side is not None:
            labels.tie(side, side[:, :1])
    firsts = [None if side is None else side[:, 0] for side in by_group]
    labels.meet(*firsts, why=("", _why(labels, x)))
    return outputs


def _quieten(labels: Labels, left: tuple[Tensor, int], right: tuple[Tensor, int]) -> None:
    """Fix channels over which a product sums if neither factor is zero where they are dropped."""
    if labels.loud(left[0]) and labels.loud(right[0]):
        for side in (labels.along(*left), labels.along(*right)):
            if side is not None:
                labels.fix(side, LOUD)


@RULES.add("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def _batch_norm(labels: Labels, out: Any, x: Tensor, *args: Any) -> None:
    for dim in range(x.ndim):
        if dim != 1:  # In training, its statistics are over all that is not a channel to it.
            labels.keep_whole(x, dim, STATISTICS)
    _affine(labels, out, x, *args)


def _affine(labels: Labels, out: Any, x: Tensor, *args: Any) -> None:
    """Label a norm whose channels are dimension 1: a weight that is masked makes it silent.

    Its arguments are weight and bias, which may be None, perhaps statistics, and numbers.
    """
    for tensor in args:
        if isinstance(tensor, Tensor):
            labels.pair(tensor, 0, x, 1)
    scale, bias = x if args[0] is None else args[0], args[1]
    loud = labels.loud(scale) or (bias is not None and labels.loud(bias))
    labels.put(first(out), labels.of(x), loud)


@RULES.add("native_layer_norm")
def _layer_norm(labels: Labels, out: Any, x: Tensor, shape: Sequence[int], *args: Any) -> None:
    affine = [tensor for tensor in args if isinstance(tensor, Tensor)]
    if len(shape) == 1:
        for tensor in affine:
            labels.pair(tensor, 0, x, -1)
    else:
        for dim in range(1, len(shape) + 1):
            for tensor in (x, *affine):
                labels.keep_whole(tensor, -dim, "normalises several dimensions; they stay whole")
    labels.put(first(out), labels.of(x))


@RULES.add("native_group_norm")
def _group_norm(labels: Labels, out: Any, x: Tensor, *args: Any) -> None:
    *_, groups, _ = args
    for dim in range(2, x.ndim):
        labels.keep_whole(x, dim, STATISTICS)
    found = labels.along(x, 1)
    if found is not None:
        # Whole groups are dropped, so that the statistics of the others stay what they are.
        by_group = found.reshape(groups, -1)
        if groups == 1:
            labels.fix(found, "normalises all channels together; they stay whole")
        elif not isinstance(labels.layer, nn.GroupNorm):
            labels.fix(found, "has a fixed number of groups; the channels it reads stay whole")
        labels.tie(by_group, by_group[:, :1])
    _affine(labels, out, x, *args)


@RULES.add("embedding")
def _embedding(labels: Labels, out: Tensor, weight: Tensor, *args: Any) -> None:
    labels.keep_whole(weight, 0)
    features = labels.along(weight, 1)
    labels.put(
        out, [] if features is None else [spread(features, -1, out.ndim)], labels.loud(weight)
    )


@RULES.add("_weight_norm_interface")
def _weight_norm(labels: Labels, out: Any, direction: Tensor, length: Tensor, dim: int = 0) -> None:
    for other in range(direction.ndim):
        if other != dim % direction.ndim:
            labels.keep_whole(direction, other, STATISTICS)
    labels.pair(length, dim, direction, dim)
    labels.put(first(out), labels.of(direction), labels.loud(length))


def _contract(labels: Labels, out: Tensor, left: Tensor, right: Tensor, letters: str) -> None:
    """Label a product written as in einsum, e.g. "mk,kn->mn"."""
    of_left, of_right, of_out = re.split(",|->", letters)
    # Batch dimensions come last: where heads are one, asking for the entries inside them first
    # decides that these are cut and the heads kept. If one side is cut by heads already, as where
    # positions rotate the entries inside, the other is too.
    batch = set(of_left) & set(of_right) & set(of_out)
    sides = ((left, of_left), (right, of_right))
    by_heads = any(_only(labels, t, names.index(b)) for t, names in sides for b in batch)
    order = sorted(
        set(of_left + of_right), key=lambda letter: ((letter in batch) != by_heads, letter)
    )
    found: dict[str, Array | None] = {}
    loud = False
    for letter in order:
        held = [(tensor, names.index(letter)) for tensor, names in sides if letter in names]
        if len(held) == 1:
            found[letter] = labels.along(*held[0])
        else:
            if letter not in of_out:
                _quieten(labels, *held)
            found[letter] = labels.pair(*held[0], *held[1])
        if letter in of_out and found[letter] is not None:
            loud |= all(labels.loud(tensor) for tensor, _ in held)
    factors = [(found[letter], dim) for dim, letter in enumerate(of_out)]
    labels.put(out, [spread(f, dim, out.ndim) for f, dim in factors if f is not None], loud)


def _only(labels: Labels, tensor: Tensor, dim: int) -> bool:
    """Tell whether a tensor's channels along a dimension can be dropped as they are."""
    return any(varying(factor) == [dim] for factor in labels.of(tensor))


@RULES.add("mm", "bmm")
def _mm(labels: Labels, out: Tensor, left: Tensor, right: Tensor) -> None:
    batch = "b" * (left.ndim - 2)
    _contract(labels, out, left, right, f"{batch}mk,{batch}kn->{batch}mn")


@RULES.add("addmm", "baddbmm")
def _addmm(labels: Labels, out: Tensor, bias: Tensor, left: Tensor, right: Tensor) -> None:
    _mm(labels, out, left, right)
    _biased(labels, out, bias)


def _biased(labels: Labels, out: Tensor, bias: Tensor) -> None:
    loud = labels.loud(out) or labels.loud(bias)
    pointwise(labels, out, [bias, out])
    labels.set_loud(out, loud)


@RULES.add("linear")
def _linear(
    labels: Labels, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    rows = "abcdefgh"[: x.ndim - 1]
    _contract(labels, out, x, weight, f"{rows}k,nk->{rows}n")
    if bias is not None:
        _biased(labels, out, bias)
