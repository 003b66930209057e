"""Running models without data, and seeing every operation that they run."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sizewise.torch_tools import results
from sizewise.torch_tools.copying import copied
from sizewise.torch_tools.dispatch import DispatchMode
from sizewise.torch_tools.failures import Paths
from sizewise.torch_tools.whole_numbers import WholeNumbers

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_COPIES = ("clone", "_unsafe_view", "copy", "_to_copy")
_PRODUCTS = {
    "mm": ("matmul",),
    "bmm": ("matmul",),
    "addmm": ("matmul", "add"),
    "baddbmm": ("matmul", "add"),
}


def on_meta(model: nn.Module, trial: bool = False) -> nn.Module:
    """Return a copy of a model in eval mode without data, whose tied tensors are still tied.

    Args:
        model: Any module; it is left as it was.
        trial: For a trial run in any mode: tensors that are plain attributes have no data either,
            unless they are single numbers, and torch's dropout is off, as it treats channels alike.

    Raises:
        ModelError: The model cannot be copied.
    """

    def empty(tensor: Tensor) -> Tensor:
        if tensor.is_meta:  # Torch's own way would import its compiler.
            like = tensor.shape, tensor.stride()
            return torch.empty_strided(*like, dtype=tensor.dtype, device="meta")
        return torch.empty_like(tensor, device="meta")

    def attribute(tensor: Tensor) -> Tensor:
        return empty(tensor) if trial and tensor.ndim else tensor.clone()

    double = copied(model, empty, attribute).requires_grad_(False).eval()
    for module in double.modules() if trial else ():
        if type(module) in _DROPOUT:
            vars(module)["p"] = 0.0
    return double


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers with their names; a tied one once for each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def run(model: nn.Module, *inputs: Tensor) -> object:
    """Run a forward pass in which every operation is seen, on the device of the inputs.

    What the model draws at random is the same each time, and nobody else's numbers change.
    """
    states = random.getstate(), np.random.get_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        # The fused kernel of nn.TransformerEncoderLayer in eval mode is one operation, all of it.
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), torch.device(inputs[0].device), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            result: object = model(*inputs)
            return result
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.backends.mha.set_fastpath_enabled(fast)


def operation(func: Any) -> str:
    """Return the name of an operation, the same in place and out of place."""
    return str(func._schema.name).partition("::")[2].rstrip("_")


def computed(func: Any) -> tuple[str, ...]:
    """Return what an operation computes from tensors; nothing if it is a view, copy or factory.

    The same code can take different paths at different widths: views and copies come and go with
    strides and sizes of 1, and a product is one of matrices or a batch of them, with the sum or
    without. What is returned here is the same at every width.
    """
    name = operation(func)
    takes = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    gives = [str(result.type) for result in func._schema.returns]
    if func.is_view or name in _COPIES or not takes or gives[:1] != ["Tensor"]:
        return ()
    return _PRODUCTS.get(name, (name,))


def positional(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments of an operation in the order of its schema, as far as they are given."""
    yield from args
    for argument in func._schema.arguments[len(args) :]:
        if argument.kwarg_only:
            return
        yield kwargs.get(argument.name, argument.default_value)


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors in a nest of containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class MetaMode(DispatchMode):
    """Runs operations on meta tensors while it is entered, without importing torch's compiler.

    It answers what a forward asks about whole numbers that it counted itself; see `WholeNumbers`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = WholeNumbers()

    def _operate(self, func: Any, args: Any, kwargs: Any) -> object:
        answer = self.numbers.answer(func, args)
        if answer is not None:
            return answer
        out = results.on_meta(func, args, kwargs)
        self.numbers.note(func, args, kwargs, out)
        return out


Seen = tuple[str, str, tuple[int, ...]]
"""What an operation computes, the path of the module that runs it, and the shape of its result."""


class Recorder(MetaMode):
    """Notes in `seen`, in order, all results that are computed in floating point, and where."""

    def __init__(self, paths: Paths) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self._paths = paths

    def _operate(self, func: Any, args: Any, kwargs: Any) -> object:
        out = super()._operate(func, args, kwargs)
        found = tensors_in(out)
        if found and found[0].is_floating_point():
            shape = tuple(found[0].shape)
            self.seen += [(kind, self._paths.current, shape) for kind in computed(func)]
        return out
