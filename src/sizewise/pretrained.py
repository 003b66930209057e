"""Starting from weights that somebody has trained: any state dict, as safetensors."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sizewise.errors import ConfigError, ModelError
from sizewise.view import Tensors


def load(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict, by name.

    Files of `torch.save` are refused: reading one can run code.

    Args:
        path: A `.safetensors` file, or a folder with a `model.safetensors`.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    if path.is_dir():
        path = path / "model.safetensors"
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"model.weights: there is no file {str(path)!r}") from None
    except OSError as error:
        raise ConfigError(f"model.weights: {str(path)!r} cannot be read: {error}") from None
    except SafetensorError:
        raise ConfigError(
            f"model.weights: {str(path)!r} is no safetensors file; write one with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        ) from None


def fitting(weights: Tensors, model: nn.Module, source: str) -> dict[str, Tensor]:
    """Return the weights that a model has a place for: of the same name and shape.

    What is missing or of another shape, such as the classifier of other classes, stays as it is.
    Tied tensors are returned under all their names, whichever of them was stored.

    Args:
        weights: What was loaded.
        model: The model.
        source: Where the weights came from, for the error.

    Raises:
        ModelError: None of them fits.
    """
    own = model.state_dict(keep_vars=True)
    known = {
        id(tensor): weights[name].to(tensor.dtype)
        for name, tensor in own.items()
        if name in weights and weights[name].shape == tensor.shape
    }
    fit = {name: known[id(tensor)] for name, tensor in own.items() if id(tensor) in known}
    if not fit:
        raise ModelError(
            f"none of the {len(weights)} tensors in {source!r} has the name and shape of one of "
            f"the model's; expected names such as {next(iter(own))!r}, got "
            f"{next(iter(weights), 'nothing')!r}"
        )
    return fit
