"""Models of torchvision: `model.name = "torchvision.models:resnet18"`, options in `model.args`."""

from importlib import import_module
from typing import Any

from torch import nn

from sizewise.errors import ModelError


def build(name: str, /, *, classes: int, **args: Any) -> nn.Module:
    """Return a classifier of torchvision with random weights; it takes images of three channels.

    Args:
        name: What `torchvision.models` calls it.
        classes: Outputs.
        args: Further arguments of torchvision's function.
    """
    try:
        models = import_module("torchvision.models")
    except ImportError:
        raise ModelError("it needs torchvision; pip install torchvision") from None
    make = getattr(models, name, None)
    if not callable(make):
        raise ModelError(f"torchvision.models has no model {name!r}")
    model: nn.Module = make(num_classes=classes, **args)
    return model
