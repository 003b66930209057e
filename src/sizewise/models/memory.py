"""Models that come from Python: what is understood, and how a run folder remembers them.

A run folder cannot hold a model's code. Its config says `name = "memory:Net"`, or where to import
it, and a `sha256` of what the model is made of and of what it calls, so that nobody goes on with
another one. A model that came built is where a run starts from: `weights` says which ones.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sizewise.data.catalog import MEMORY
from sizewise.errors import ConfigError
from sizewise.exchange.state import sha256
from sizewise.torch_tools.remaking import clone, remade


@dataclass(frozen=True)
class Given:
    """A model that was given from Python, not by its name.

    Attributes:
        name: What a config calls it.
        make: What builds it.
        weights: What a config calls the weights that it starts from, if it came built.
    """

    name: str
    make: Callable[..., nn.Module]
    weights: str | None = None

    def table(self) -> dict[str, str]:
        """Return its `[model]` table."""
        return {"name": self.name, **({} if self.weights is None else {"weights": self.weights})}


@dataclass(frozen=True, eq=False)
class Built:
    """A model that is built already, as a factory of copies of it."""

    module: nn.Module

    @property
    def weights(self) -> str:
        """What a config calls its weights: their hash."""
        return f"{MEMORY}{sha256(self.module.state_dict())}"

    def __call__(self, **options: object) -> nn.Module:
        """Return a copy, ready to train."""
        if options:
            raise ConfigError("it is built already, so it takes no options")
        return remade(self.module, clone).train()


def understood(model: object) -> str | Given:
    """Return what `federate` was given as a name for the config, or as something to build from.

    Raises:
        ConfigError: It is neither a name, a module, nor something that builds one.
        ModelError: It is a module that cannot be copied.
    """
    if isinstance(model, str):
        return model
    if isinstance(model, nn.Module):
        built = Built(remade(model, clone).cpu())
        return Given(f"{MEMORY}{type(model).__name__}", built, built.weights)
    if not callable(model):
        raise ConfigError(
            "model is a name, an nn.Module, or a function or class that builds one; a "
            f"{type(model).__name__} came: give one of those"
        )
    return Given(_name(model), model)


def _name(make: Callable[..., object]) -> str:
    """Return where a function or class can be imported from, or else that it came from memory."""
    module = getattr(make, "__module__", None) or ""
    name = getattr(make, "__qualname__", type(make).__qualname__)
    if getattr(sys.modules.get(module), name, None) is make:
        return f"{module}:{name}"
    return f"{MEMORY}{name.rpartition('.')[2]}"


def identity(model: nn.Module, sample: Tensor) -> str:
    """Return a hash of a model's modules, its tensors' shapes, and what it calls on a sample.

    It is the same for all weights, on every machine with this version of torch.
    """
    probe, calls = remade(model, clone).eval(), _Calls()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), calls:
        probe(sample)
    shapes = {name: f"{t.dtype}{tuple(t.shape)}" for name, t in model.state_dict().items()}
    # Where something lies in memory says nothing of what it is.
    modules = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(model))
    return hashlib.sha256(json.dumps([modules, shapes, calls.made]).encode()).hexdigest()


class _Calls(TorchFunctionMode):
    """Notes each function of torch that is called, with those arguments that are plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note a call, and make it."""
        named = kwargs or {}
        values = [repr(value) for value in args if _plain(value)]
        values += [f"{key}={value!r}" for key, value in named.items() if _plain(value)]
        self.made.append(f"{getattr(func, '__name__', '')}({', '.join(values)})")
        return func(*args, **named)


def _plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str)
