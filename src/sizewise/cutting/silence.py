"""Silence: whether a result is zero where a channel is dropped that the full model has masked.

The reference of a narrow model is the full one with the dropped channels' weights at zero. What a
layer gives there is zero, and stays so through a ReLU. A sigmoid makes it 0.5, which is as good,
because the weights that read it are zero. But where two such results meet in a product that sums
over channels, as the features of linear attention do, the full model adds terms that the narrow
one does not have. So `layer_rules` asks here, and leaves those channels whole.

A tensor is *loud* if it may be other than zero there. Pointwise operations are tried on zeros; the
rest follows from a few names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sizewise.cutting.union_find import Array, Labels, varying
from sizewise.torch_tools.dry_run import operation, tensors_in

_NUMBERS = (0.3, -0.7, 1.9, -1.3)
_WAKING = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "logsumexp"})


def wakes(func: Any, args: Sequence[Any]) -> bool:
    """Tell whether an operation on shapes or along dimensions makes zeros other than zero."""
    name = operation(func)
    padded = args[2] if name == "constant_pad_nd" and len(args) > 2 else 0
    return name in _WAKING or padded != 0


def is_loud(
    labels: Labels, func: Any, args: Any, kwargs: Mapping[str, Any], out: Tensor, loud: set[int]
) -> bool:
    """Tell whether the result of a pointwise operation, which has its factors already, is loud.

    `loud` has the ids of the arguments that were loud before; the result may be one of them.
    """
    read = tensors_in((args, kwargs))
    for factor in labels.of(out):
        silent = {id(t) for t in read if id(t) not in loud and _holds(labels, t, factor)}
        if not _zero_at_zero(func, args, kwargs, silent):
            return True
    return False


def _holds(labels: Labels, tensor: Tensor, factor: Array) -> bool:
    """Tell whether a tensor has the channels of a factor, counted from the last dimension."""
    dims = {dim - factor.ndim for dim in varying(factor)}
    return any(dims & {d - f.ndim for d in varying(f)} for f in labels.of(tensor))


def _zero_at_zero(func: Any, args: Any, kwargs: Mapping[str, Any], silent: set[int]) -> bool:
    """Try an operation on a few numbers, with zeros for the tensors that are silent."""
    if torch.Tag.nondeterministic_seeded in func.tags or operation(func) == "empty_like":
        return operation(func) == "native_dropout"  # Others do not look at what they are given.
    shift = 0

    def stand_in(leaf: object) -> object:
        nonlocal shift
        if not isinstance(leaf, Tensor):
            return leaf
        shift += 1
        numbers = [0.0] * 4 if id(leaf) in silent else _NUMBERS[shift % 4 :] + _NUMBERS[: shift % 4]
        found = torch.tensor(numbers, device="cpu")
        # A condition that is met and one that is not.
        return found > 0 if leaf.dtype == torch.bool else found.to(leaf.dtype)

    positional, named = tree_map(
        stand_in, (args, {k: v for k, v in kwargs.items() if k != "device"})
    )
    try:
        result = func(*positional, **named)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return bool((tensors_in(result)[0] == 0).all())
