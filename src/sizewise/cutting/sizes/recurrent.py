"""Recurrent layers: the hidden size is cut in all gates, layers and directions at once."""

from typing import Any

from torch import Tensor, nn

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
    weights: dict[str, Tensor] = dict(
        zip(narrow._flat_weights_names, _weights(narrow), strict=True)
    )
    gates = _weights(full)[0].shape[0] // full.hidden_size
    narrow.input_size = weights["weight_ih_l0"].shape[1]
    narrow.hidden_size = weights["weight_ih_l0"].shape[0] // gates
    if full.proj_size:
        narrow.proj_size = weights["weight_hr_l0"].shape[0]
    narrow._flat_weights = _weights(narrow)


def _weights(module: nn.RNNBase) -> list[Any]:
    # Attributes, not parameters: `weight_norm` computes some of them.
    return [getattr(module, name) for name in module._flat_weights_names]


@resize.register
def _(narrow: nn.RNNCellBase, full: nn.RNNCellBase) -> None:
    narrow.hidden_size, narrow.input_size = narrow.weight_hh.shape[1], narrow.weight_ih.shape[1]
