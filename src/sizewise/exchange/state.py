"""The server's state: all that a run must remember from one round to the next."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sizewise.exchange.view import Tensors


@dataclass(frozen=True)
class State:
    """Everything a checkpoint holds. Never changed in place: a round makes a new one.

    Attributes:
        tensors: The model's tensors by server name; what devices see through their views.
        memory: Other server tensors: moments of the server optimiser, a feature store.
        extras: Small facts, JSON-able.
        devices: What devices remember between rounds, by device number; read from disk on demand.
    """

    tensors: Mapping[str, Tensor]
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[int, Tensors] = field(default_factory=dict)


def sha256(tensors: Tensors) -> str:
    """Return the hash of named tensors: names, types, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
