"""Starting from weights that somebody has trained: any state dict, as safetensors."""

import importlib.util
import logging
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sizewise.data import hub
from sizewise.data.catalog import MEMORY
from sizewise.errors import ConfigError, ModelError
from sizewise.exchange.view import Tensors

STORED = "model.safetensors"


def folder(name: str) -> Path:
    """Return the folder with published weights, their `config.json` and tokenizer.

    Args:
        name: Its path; or a Python package that carries it; or "owner/name" on the Hugging Face
            hub, from where it is downloaded once.

    Raises:
        ConfigError: There is no such thing.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    for place in (spec and spec.submodule_search_locations) or ():
        for inner in (Path(place), Path(place, "model")):
            if (inner / STORED).is_file():
                return inner
    if name.count("/") != 1 or path.is_absolute():
        raise ConfigError(
            f"model.weights: {name!r} is neither a file, a folder or an installed package with a "
            f"{STORED}, nor 'owner/name' on the Hugging Face hub"
        )
    from huggingface_hub import snapshot_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    online, files = hub.reachable(), ["*.json", STORED]
    try:
        return Path(snapshot_download(name, allow_patterns=files, local_files_only=not online))
    except Exception as error:  # The network can fail in any way.
        reason = str(error).strip().partition("\n")[0]
        if not online:
            reason = "there is no network, and nothing was downloaded before"
        raise ConfigError(
            f"model.weights: {name!r} could not be loaded from the Hugging Face hub ({reason}); "
            "check the name and the connection, or give a folder"
        ) from None


def described(name: str | None) -> Path | None:
    """Return the folder that tells more about weights; None for a bare file, and for no name."""
    if name is None or name.startswith(MEMORY):
        return None
    if name.endswith(".safetensors") or Path(name).expanduser().is_file():
        return None
    return folder(name)


def file_of(name: str | Path) -> Path:
    """Return the file of weights that a name means."""
    path = Path(name).expanduser()
    if path.is_file() or path.suffix == ".safetensors":
        return path
    return folder(str(name)) / STORED


def load(name: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict, by name.

    Files of `torch.save` are refused: reading one can run code.

    Args:
        name: A `.safetensors` file, or what `folder` takes.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    path = file_of(name)
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

    Raises:
        ModelError: None of them fits; it names their source.
    """
    # A model may have other names for its tensors than those they are published under.
    published = getattr(model, "published", None)
    weights = published(weights) if callable(published) else weights
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
