"""Recurrent layers: the hidden size is cut in all gates, layers and directions at once."""

from torch import nn

from sizewise.cutting.sizes.registry import resize


def begins_with_zeros(module: nn.Module) -> bool:
    """Tell whether the zeros that a module makes are a state as wide as its tensors."""
    return isinstance(module, nn.RNNBase | nn.RNNCellBase) or "Mamba" in type(module).__name__


@resize.register
def _(narrow: nn.RNNBase, full: nn.RNNBase) -> None:
    gates = full.weight_hh_l0.shape[0] // full.hidden_size
    narrow.hidden_size = narrow.weight_hh_l0.shape[0] // gates
    narrow.input_size = narrow.weight_ih_l0.shape[1]
    if full.proj_size:
        narrow.proj_size = narrow.weight_hr_l0.shape[0]
    narrow._flat_weights = [getattr(narrow, name) for name in narrow._flat_weights_names]


@resize.register
def _(narrow: nn.RNNCellBase, full: nn.RNNCellBase) -> None:
    narrow.hidden_size, narrow.input_size = narrow.weight_hh.shape[1], narrow.weight_ih.shape[1]
