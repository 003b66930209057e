"""What a cut model must compute: the full model with the dropped channels masked.

The reference is the full model in which every entry outside the view is 0 (a running variance 1),
so that a dropped channel adds nothing to whatever reads it. Three things are meant to differ in a
narrow model and are accounted for: a layer norm has the statistics of the channels that exist;
factors that a forward reads off its sizes are those of the narrow ones, above all the square root
of the thinner head that attention logits are divided by; and where channels are cut loosely, a sum
drops the channels of the shortcut that the block does not have, so they are masked in the sum.

Both modes are compared. In training, batch statistics are those of the batch, and they are the
same per channel in both models, as are the running ones afterwards. Random numbers, such as those
of dropout, are replaced by constants.
"""

import torch
from torch import Tensor, nn

from sizewise.cutting.comparing import Pair
from sizewise.cutting.groups import Channels, Kept
from sizewise.cutting.shrinking import shrink, view
from sizewise.errors import ModelError
from sizewise.exchange.view import cut, grid
from sizewise.torch_tools.copying import copied
from sizewise.torch_tools.dry_run import named_tensors


@torch.no_grad()
def masked(model: nn.Module, channels: Channels, kept: Kept) -> nn.Module:
    """Return a copy of a model, of full size, in which the dropped channels are silent.

    Layer norms still see them, as zeros.

    Args:
        model: The full model; it is left as it was.
        channels: What `trace` found in it.
        kept: For each group, the kept channels.
    """
    model = copied(model, torch.clone)
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

    It is checked in float64, in eval and in training mode, for random weights and statistics: fresh
    models have norms that do nothing and layers that are zero, which would hide mistakes.

    Args:
        model: The full model; it is left as it was.
        channels: What `trace` found in it, loose or not.
        kept: For each group, the kept channels; the first ones, where channels are cut loosely.
        inputs: What its forward takes. By default random, of the traced shapes.
        seed: For the random numbers.

    Returns:
        The largest difference between the outputs, and between the running statistics after the
        pass in training mode, relative to the largest number.

    Raises:
        ModelError: They differ by more than rounding explains, or the model cannot be run so.
    """
    generator = torch.Generator().manual_seed(seed)
    full = copied(model, _exact, _exact)
    _randomise(full, generator)
    small = shrink(full, channels, kept)
    places = view(channels, kept)
    held = small.state_dict()
    for name, tensor in cut(full.state_dict(), places).items():
        if not torch.equal(tensor, held[name]):
            raise ModelError(f"the cut model's {name!r} is not what its view says; this is a bug")
    pair = Pair(small, masked(full, channels, kept), channels, kept, places)
    given = [_input(x, generator) for x in inputs or channels.inputs]
    return max(pair.difference(given, training) for training in (False, True))


def _exact(tensor: Tensor) -> Tensor:
    floating = tensor.is_floating_point()
    return tensor.detach().to("cpu", torch.float64 if floating else tensor.dtype, copy=True)


@torch.no_grad()
def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    tensor: Tensor
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
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
