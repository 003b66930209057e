"""Randomness that must stay secret: noise, and who is asked in a round.

Everybody may know a run's seed; who knows the noise can take it off, and who knows that a device
was asked has nothing hidden by sampling. So both come from 32 bytes of the operating system. They
are expanded by SHAKE-256, so a run that is resumed draws what it drew before.

Normal numbers are made of 53 random bits each, in float64. That is no defence against attacks that
look at the last bits of floating-point noise (Mironov, 2012; Jin et al., 2022).
"""

import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

KEY_BYTES = 32


class Secret:
    """A key, and what is drawn from it, each time for a purpose."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    @classmethod
    def fresh(cls) -> "Secret":
        """Return a key that nobody knows."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def of_seed(cls, seed: int) -> "Secret":
        """Return the key of a simulation, which everybody can make who knows the seed."""
        return cls(hashlib.sha256(f"simulation/{seed}".encode()).digest())

    def whole_number(self, purpose: str) -> int:
        """Return a number to derive generators from, in place of a run's seed."""
        return int.from_bytes(self._expanded(KEY_BYTES, purpose), "big")

    def digest(self, tensors: Iterable[tuple[str, Tensor]], *purpose: object) -> str:
        """Return a name for some tensors that tells nothing of them without the key."""
        found = hashlib.blake2b(_text(purpose), key=self.key, digest_size=16)
        for name, tensor in tensors:
            found.update(f"/{name}/{tuple(tensor.shape)}/".encode())
            found.update(tensor.detach().cpu().contiguous().numpy().data)
        return found.hexdigest()

    def normal(self, shape: Sequence[int], *purpose: object) -> Tensor:
        """Return independent standard normal numbers of a shape, float64."""
        count = math.prod(shape)
        drawn = np.frombuffer(self._expanded(8 * count, *purpose), np.uint64)
        uniform = ((drawn >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        found: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
        return found.reshape(tuple(shape))

    def _expanded(self, size: int, *purpose: object) -> bytes:
        return hashlib.shake_256(self.key + _text(purpose)).digest(size)


def _text(purpose: Iterable[object]) -> bytes:
    return "/".join(map(str, purpose)).encode()
