"""The slow way to a masked model: entries that a view leaves out are set to zero, one by one."""

from collections.abc import Mapping

import torch
from torch import nn

from sizewise.exchange.view import TensorSlice


@torch.no_grad()
def drop_entries(model: nn.Module, places: Mapping[str, TensorSlice]) -> None:
    """Set what lies outside a view to zero; changes the model."""
    for name, tensor in model.named_parameters():
        index = places[name].index
        if index is not None:
            held = torch.zeros(tensor.shape, dtype=torch.bool)
            along = [torch.arange(n)[part] for n, part in zip(tensor.shape, index, strict=True)]
            for place in torch.cartesian_prod(*along).reshape(-1, tensor.ndim):
                held[tuple(place)] = True
            tensor[~held] = 0.0
