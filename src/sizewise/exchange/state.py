"""The server's state: all that a run must remember from one round to the next."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sizewise.common.structure import build, plain
from sizewise.errors import CheckpointError
from sizewise.exchange.view import Tensors

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """Everything a checkpoint holds. Never changed in place: a round makes a new one.

    Attributes:
        tensors: The model's tensors by server name; what devices see through their views.
        server_state: Other server tensors: moments of the server optimiser, a feature store.
        metadata: Small facts, JSON-able: for each kind of `facts`, by its name, the values.
        devices: What devices remember between rounds, by device number; read from disk on demand.
    """

    tensors: Mapping[str, Tensor]
    server_state: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[int, Tensors] = field(default_factory=dict)

    def facts(self, kind: type[T]) -> T:
        """Return what a method noted.

        Args:
            kind: The frozen dataclass that the method keeps its facts in.

        Raises:
            CheckpointError: It noted nothing of that kind.
        """
        if kind.__name__ not in self.metadata:
            raise CheckpointError(
                f"the run's state holds no {kind.__name__}, so another version of sizewise or of "
                f"the method wrote it; start a new run"
            )
        return build(kind, self.metadata[kind.__name__], kind.__name__)

    def noting(self, facts: Any) -> "State":
        """Return the state with these facts in place of earlier ones of their kind."""
        return replace(self, metadata={**self.metadata, type(facts).__name__: plain(facts)})


def sha256(tensors: Tensors) -> str:
    """Return the hash of named tensors: names, types, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
