"""Blurring what a device shares of its samples, before it leaves the device.

Each row is scaled down to a largest norm, then normal noise is added to each of its numbers. If a
row is one sample's, sent once, that is the Gaussian mechanism with sensitivity 2 `clip`: for
epsilon below 1, `noise` >= 2 clip sqrt(2 ln(1.25 / delta)) / epsilon. Nobody adds up the rounds
here: a device that shares in every round spends that much in every round.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sizewise.errors import ConfigError


@dataclass(frozen=True)
class Blur:
    """Options of methods that share something of every sample.

    Attributes:
        clip: Largest Euclidean norm of what is shared of one sample, for each tensor; default: any.
        noise: Standard deviation of the noise that is added to every number of it.
    """

    clip: float | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ConfigError(f"method.clip must be a positive number, not {self.clip}")
        if not 0 <= self.noise < math.inf:
            raise ConfigError(f"method.noise must not be negative, not {self.noise}")

    def blur(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return rows (n, ...) of samples as they may be shared, in host memory."""
        rows = rows.cpu().float()
        if self.clip is not None:
            lengths = rows.flatten(1).norm(dim=1).clamp(min=self.clip)
            rows = rows * (self.clip / lengths).reshape(-1, *[1] * (rows.ndim - 1))
        if self.noise:
            rows = rows + self.noise * torch.randn(rows.shape, generator=generator)
        return rows
