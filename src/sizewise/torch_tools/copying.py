"""Copies of models that can be traced and cut."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from sizewise.errors import ModelError
from sizewise.torch_tools.remaking import remade

_REMAKERS = (WeightNorm, SpectralNorm, BasePruningMethod)


def copied(
    model: nn.Module,
    change: Callable[[Tensor], Tensor],
    plain: Callable[[Tensor], Tensor] = torch.clone,
) -> nn.Module:
    """Return a copy of a model with other tensors in it, as `remade` does.

    Args:
        model: Any module; it is left as it was.
        change: From a parameter or buffer to that of the copy.
        plain: From a tensor that is a plain attribute to that of the copy.

    Raises:
        ModelError: The model cannot be copied, or a copy could not be cut.
    """
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
    return remade(model, change, plain)


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
