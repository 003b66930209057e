"""Recurrent layers: the hidden size is cut in all gates, layers and directions at once."""

from torch import nn

from sizewise.cutting.sizes.registry import resize


def state_dim(module: nn.Module) -> int | None:
    """Return which dimension of the zeros that a module makes is as wide as its tensors.

    They are the state that it begins with. None: its zeros are no such state.
    """
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return -1
    return 1 if "Mamba" in type(module).__name__ else None


@resize.register
def _(narrow: nn.RNNBase, full: nn.RNNBase) -> None:
    gates = len(full.get_parameter("weight_hh_l0")) // full.hidden_size
    inputs, states = (narrow.get_parameter(f"weight_{name}_l0") for name in ("ih", "hh"))
    narrow.hidden_size, narrow.input_size = len(states) // gates, inputs.shape[1]
    if full.proj_size:
        narrow.proj_size = len(narrow.get_parameter("weight_hr_l0"))
    narrow._flat_weights = [getattr(narrow, name) for name in narrow._flat_weights_names]


@resize.register
def _(narrow: nn.RNNCellBase, full: nn.RNNCellBase) -> None:
    narrow.hidden_size, narrow.input_size = narrow.weight_hh.shape[1], narrow.weight_ih.shape[1]
