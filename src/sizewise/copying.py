"""Copies of models, whatever they hold."""

import copy
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from sizewise.errors import ModelError
from sizewise.failures import reason

_REMAKERS = (WeightNorm, SpectralNorm, BasePruningMethod)


def copied(
    model: nn.Module,
    change: Callable[[Tensor], Tensor],
    plain: Callable[[Tensor], Tensor] = torch.clone,
) -> nn.Module:
    """Return a copy of a model with other tensors in it; tied ones are still tied.

    Tensors that modules keep as plain attributes are copied without the graph that made them, which
    `copy.deepcopy` refuses.

    Args:
        model: Any module; it is left as it was.
        change: From a parameter or buffer to that of the copy.
        plain: From a tensor that is a plain attribute to that of the copy.

    Raises:
        ModelError: The model holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{path or type(model).__name__} is compiled by torch.jit, so its code cannot be "
                "followed or cut; use the Python module that it was made of"
            )
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ModelError(
                f"{path or type(model).__name__} has parameters without a shape yet; run the model "
                "once on a batch before it is used"
            )
        memo |= _tensors(module, change, plain, memo)
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied: {_culprit(model, memo)} cannot "
            f"({reason(error)}); make it when it is needed, or keep it outside the model"
        ) from error


@torch.no_grad()
def _tensors(
    module: nn.Module,
    change: Callable[[Tensor], Tensor],
    plain: Callable[[Tensor], Tensor],
    known: Container[int],
) -> dict[int, Tensor]:
    """Return a module's own tensors for the copy, by the ids of the old ones."""
    found: dict[int, Tensor] = {}
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if id(tensor) not in known:
            other = change(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            found[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if is_parameter else other
    for leaf in tree_leaves(list(vars(module).values())):
        if isinstance(leaf, Tensor) and id(leaf) not in known and id(leaf) not in found:
            found[id(leaf)] = plain(leaf)
    return found


def _culprit(model: nn.Module, memo: dict[int, Any]) -> str:
    """Return the attribute of a model that cannot be copied."""
    for path, module in reversed(list(model.named_modules())):
        for name, value in vars(module).items():
            if name not in ("_modules", "_parameters", "_buffers"):
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:  # Of any class: it is what is looked for.
                    return f"its attribute {f'{path}.{name}' if path else name!r}"
    return "something in it"


def remake(model: nn.Module) -> None:
    """Compute anew the weights that layers make of others before they run.

    Those are plain attributes in torch's old `weight_norm`, `spectral_norm` and `prune`, and still
    have the old sizes when the tensors that they are made of were cut.
    """
    with torch.no_grad():
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, _REMAKERS):
                    hook(module, ())
