"""Copies of modules that are made of other tensors: clones, or tensors without data."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from sizewise.hollow import Hollow


def clone(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values, and no history."""
    return tensor.detach().clone()


def remade(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a module whose tensors are made from those of the module, one by one."""
    constants = (*module.buffers(), *plain_tensors(module))
    memo: dict[int, Any] = {id(tensor): make(tensor) for tensor in constants}
    for parameter in module.parameters():
        memo[id(parameter)] = as_parameter(make(parameter), parameter.requires_grad)
    layers = list(module.modules())
    if not any(hasattr(layer, "__deepcopy__") for layer in layers):
        # The same as `deepcopy` would do, which spends most of its time on empty tables of hooks.
        memo |= {id(layer): object.__new__(type(layer)) for layer in layers}
        for layer in layers:
            vars(memo[id(layer)]).update({k: _copied(v, memo) for k, v in vars(layer).items()})
    return copy.deepcopy(module, memo)


_ATOMS = frozenset({type(None), bool, int, float, str})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _ATOMS or (kind is tuple and all(type(item) in _ATOMS for item in value)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is dict:
        made = memo[id(value)] = {key: _copied(item, memo) for key, item in value.items()}
        return made
    if not value and kind in (OrderedDict, set):
        memo[id(value)] = kind()
    return copy.deepcopy(value, memo)


def as_parameter(tensor: Tensor, learns: bool = True) -> nn.Parameter:
    """Return a tensor as a parameter."""
    if not isinstance(tensor, Hollow):
        return nn.Parameter(tensor, learns)
    made: Any = tensor.requires_grad_(learns)
    made._is_param = True  # What torch knows a parameter of another class by.
    return made  # type: ignore[no-any-return]


def plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that a module holds as plain attributes, neither parameter nor buffer."""
    for layer in module.modules():
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor))
