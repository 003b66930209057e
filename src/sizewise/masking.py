"""What a cut model must compute: the full model with the dropped channels masked.

The reference is the full model in which every entry outside the view is 0 (a running variance 1),
so that a dropped channel adds nothing to whatever reads it. Two things are meant to differ in a
narrow model and are accounted for: a layer norm has the statistics of the channels that exist, and
factors that a forward reads off its sizes are those of the narrow ones, above all the square root
of the thinner head that attention logits are divided by.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from sizewise.channels import Channels, Kept, Mask
from sizewise.cutting import shrink, view
from sizewise.dispatch import DispatchMode
from sizewise.dry_run import named_tensors, operation, run
from sizewise.errors import ModelError
from sizewise.view import cut, grid

TOLERANCE = 1e-9


@torch.no_grad()
def masked(model: nn.Module, channels: Channels, kept: Kept) -> nn.Module:
    """Return a copy of a model, of full size, in which the dropped channels are silent.

    Layer norms still see them, as zeros.

    Args:
        model: The full model; it is left as it was.
        channels: What `trace` found in it.
        kept: For each group, the kept channels.
    """
    model = copy.deepcopy(model)
    where = view(channels, kept)
    for name, tensor in named_tensors(model):
        index = where[name].index if name in where else None
        if index is not None:
            outside = torch.ones(tensor.shape, dtype=torch.bool)
            outside[grid(index, tensor.shape)] = False
            tensor[outside] = 1.0 if name.endswith("running_var") else 0.0
    return model


def verify(
    model: nn.Module, channels: Channels, kept: Kept, *inputs: Tensor, seed: int = 0
) -> float:
    """Check that a model, cut, computes what the full model does with dropped channels masked.

    It is checked in float64 and eval mode, for random weights and statistics: fresh models have
    norms that do nothing and layers that are zero, which would hide mistakes.

    Args:
        model: The full model; it is left as it was.
        channels: What `trace` found in it.
        kept: For each group, the kept channels.
        inputs: What its forward takes. By default random, of the traced shapes.
        seed: For the random numbers.

    Returns:
        The largest difference between the outputs, relative to the largest output.

    Raises:
        ModelError: The outputs differ by more than rounding explains.
    """
    generator = torch.Generator().manual_seed(seed)
    full = copy.deepcopy(model).cpu().double().eval()
    _randomise(full, generator)
    small = shrink(full, channels, kept)
    held = small.state_dict()
    for name, tensor in cut(full.state_dict(), view(channels, kept)).items():
        if not torch.equal(tensor, held[name]):
            raise ModelError(f"the cut model's {name!r} is not what its view says; this is a bug")
    reference = masked(full, channels, kept)
    given = [_input(x, generator) for x in inputs or channels.inputs]
    factors = _Factors()
    with _unit_scale():
        with factors:
            got = run(small, *given)
        with _AsNarrow(channels, channels.mask(kept), factors.seen):
            expected = run(reference, *given)
    error = _difference(got, expected)
    if not error <= TOLERANCE:
        raise ModelError(
            f"{type(model).__name__}, cut, differs from its masked self by {error:.1g} of the "
            "largest output; do not train pieces of it, and please report the model"
        )
    return error


@torch.no_grad()
def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    tensor: Tensor
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        if tensor.ndim < 2:
            tensor.copy_(1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise)
        else:
            tensor.copy_(noise * (tensor[0].numel() ** -0.5))
    for name, tensor in model.named_buffers():
        noise = torch.rand(tensor.shape, dtype=torch.float64, generator=generator)
        if name.endswith("running_mean"):
            tensor.copy_(noise - 0.5)
        elif name.endswith("running_var"):
            tensor.copy_(noise + 0.5)


def _input(example: Tensor, generator: torch.Generator) -> Tensor:
    if not example.is_meta:
        return example.double() if example.is_floating_point() else example
    if example.is_floating_point():
        return torch.randn(example.shape, dtype=torch.float64, generator=generator)
    return torch.randint(0, 2, example.shape, dtype=example.dtype, generator=generator)


def _difference(got: object, expected: object) -> float:
    pairs = zip(tree_leaves(got), tree_leaves(expected), strict=True)
    return max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in pairs
        if isinstance(other, Tensor)
    )


@contextmanager
def _unit_scale() -> Iterator[None]:
    """Let attention leave its logits undivided, in heads of any size."""
    original = F.scaled_dot_product_attention

    def unscaled(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **{"scale": 1.0, **kwargs})

    # Not a TorchFunctionMode: it does not see the calls from inside nn.MultiheadAttention.
    F.scaled_dot_product_attention = unscaled
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _scales(func: Any, args: Any) -> bool:
    """Tell whether an operation multiplies or divides a tensor by a plain number."""
    return operation(func) in ("mul", "div") and isinstance(args[1], int | float)


class _Factors(DispatchMode):
    """Notes the numbers by which a model scales its tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if _scales(func, args):
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


class _AsNarrow(DispatchMode):
    """Lets layer norms of the full model see the kept channels only, and scales as the narrow one.

    The narrow model runs the same operations in the same order, which `shrink` has checked.
    """

    def __init__(self, channels: Channels, mask: Mask, factors: Sequence[float]) -> None:
        super().__init__()
        norms = [step for step in channels.steps if step.operation == "native_layer_norm"]
        # The last dimension is the one that is normalised; if several are, none is cut.
        ids = (step.ids.get(len(step.shape) - 1) for step in norms)
        self._kept = iter([None if found is None else mask[found] for found in ids])
        self._factors = iter(factors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if _scales(func, args):
            args = (args[0], next(self._factors), *args[2:])
        if operation(func) == "native_layer_norm" and (kept := next(self._kept)) is not None:
            x, _, weight, bias, eps = args
            at = torch.from_numpy(np.flatnonzero(kept))
            out, mean, rstd = func(
                x[..., at],
                [len(at)],
                None if weight is None else weight[at],
                None if bias is None else bias[at],
                eps,
            )
            return torch.zeros_like(x).index_copy_(-1, at, out), mean, rstd
        return func(*args, **(kwargs or {}))
