"""Starting from weights that somebody has trained: any file with a state dict."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sizewise.errors import ConfigError, ModelError
from sizewise.view import Tensors


def load(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict, by name.

    Args:
        path: A `.safetensors` file, a folder with a `model.safetensors`, or a file of `torch.save`,
            of which only tensors are read: no code in it is ever run.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    if path.is_dir():
        path = path / "model.safetensors"
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"model.weights: there is no file {str(path)!r}") from None
    except Exception as error:  # torch.load raises whatever the bytes make it stumble over
        kind = "safetensors file" if isinstance(error, SafetensorError) else "file of weights"
        raise ConfigError(f"model.weights: {str(path)!r} is no {kind} that can be read") from None
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ConfigError(
            f"model.weights: {str(path)!r} holds no state dict; save it with "
            "torch.save(model.state_dict(), path)"
        )
    return dict(found)


def fitting(weights: Tensors, model: Tensors, source: str) -> dict[str, Tensor]:
    """Return the weights that a model has a place for: of the same name and shape.

    What is missing or of another shape, such as the classifier of other classes, stays as it is.

    Args:
        weights: What was loaded.
        model: The model's own tensors.
        source: Where the weights came from, for the error.

    Raises:
        ModelError: None of them fits.
    """
    fit = {
        name: weights[name].to(tensor.dtype)
        for name, tensor in model.items()
        if name in weights and weights[name].shape == tensor.shape
    }
    if not fit:
        raise ModelError(
            f"none of the {len(weights)} tensors in {source!r} has the name and shape of one of "
            f"the model's; expected names such as {next(iter(model))!r}, got "
            f"{next(iter(weights), 'nothing')!r}"
        )
    return fit
