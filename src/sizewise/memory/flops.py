"""Floating-point operations, by torch's formulas."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def of(func: Any, args: Sequence[Any], out: Any) -> int:
    """Return what an operation costs: products of matrices and convolutions, as is usual.

    Args:
        func: The operation.
        args: What it was given, by position.
        out: What it returned; tensors need no data.
    """
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        # The formula itself: around it, torch looks for tensors in whatever containers there are.
        shapes = tuple(map(_shape, out)) if isinstance(out, tuple | list) else _shape(out)
        return int(formula.__wrapped__(*map(_shape, args), out_shape=shapes))
    name = func._schema.name
    if not name.startswith(_ATTENTION):
        return 0
    # Two products forward, scores and what they weigh, and two for each of them backward.
    backward = name == f"{_ATTENTION}_backward"
    queries, keys, values = (tensor.shape for tensor in args[backward : backward + 3])
    scores = 2 * math.prod(queries) * keys[-2]
    weighed = 2 * math.prod(queries[:-1]) * math.prod(values[-2:])
    return int(scores + weighed) * (2 if backward else 1)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value
