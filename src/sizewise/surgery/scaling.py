"""The scaler: a narrow model divides what it computes by its width, while it trains.

It keeps activations of narrow and wide copies in the same range (HeteroFL). Right before a batch
norm it has no effect beyond the norm's epsilon, so it matters in models without norms and, after
convolutions, in residual streams that are not normalised.

Where it follows convolutions, it also follows linear layers on feature vectors, all but the last,
as in SplitMix. Those on tokens it leaves alone, as in FeDepth's transformers: what attention makes
of its queries and keys would be another thing in training than in evaluation.
"""

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

Place = Literal["none", "norm", "conv"]


def scale(model: nn.Module, rate: float, place: Place) -> nn.Module:
    """Make a model divide by its width ratio in training, not in evaluation; changes it in place.

    It does so before each norm (HeteroFL), or after each convolution and hidden linear layer
    (SplitMix, FeDepth).
    """
    if place == "none" or rate == 1:
        return model
    scaler = _Scaler(model, rate)
    hidden = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][:-1]
    for layer in model.modules():
        if place == "norm" and isinstance(layer, _NormBase | nn.GroupNorm | nn.LayerNorm):
            layer.register_forward_pre_hook(scaler.before)
        elif place == "conv" and isinstance(layer, _ConvNd):
            layer.register_forward_hook(scaler.after)
    if place == "conv":
        for layer in hidden:
            layer.register_forward_hook(scaler.after_vectors)
    return model


class _Scaler:
    # The model's own mode decides: static batch norm lets the norms of a model in evaluation train.
    def __init__(self, model: nn.Module, rate: float) -> None:
        self.model, self.rate = model, rate

    def before(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (inputs[0] / self.rate, *inputs[1:]) if self.model.training else None

    def after(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return output / self.rate if self.model.training else None

    def after_vectors(
        self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        return self.after(layer, inputs, output) if output.ndim == 2 else None
