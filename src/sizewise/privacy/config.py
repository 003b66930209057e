"""The `[privacy]` table."""

import math
from dataclasses import dataclass
from typing import Literal

from sizewise.errors import ConfigError

Accountant = Literal["pld", "rdp"]


@dataclass(frozen=True)
class PrivacyConfig:
    """The `[privacy]` table: differential privacy for devices; see docs/privacy.md.

    Attributes:
        epsilon: The most that all rounds may spend, at `delta`. It gives the `noise`.
        noise: Or the noise multiplier: the deviation of the noise on the sum of the updates, over
            the largest norm of one. With `epsilon`, the run sets it.
        delta: The probability that goes with epsilon; keep it well below one over the number of
            devices.
        clip: The largest Euclidean norm of an update, over all tensors of its piece; where it
            adapts, that of the first round.
        quantile: Let `clip` follow this quantile of the updates' norms (Andrew et al., 2021), such
            as 0.5; the noise that hides the quantile is counted. Default: `clip` stays.
        quantile_noise: Deviation of that noise, in devices; default: a twentieth of the devices
            expected in a round, and at least `noise`.
        clip_step: How fast `clip` follows.
        smallest_weight: Entries that fewer devices than this are expected to train in a round are
            divided by this: they learn more slowly, with less noise.
        accountant: What adds up the rounds: privacy loss distributions, or Renyi divergences, which
            give a larger epsilon. Results have both.
        seed: Draw noise, and who is asked, from this number, to repeat a simulation. Whoever knows
            it can take the noise off again. Default: from a secret in the run folder.
    """

    epsilon: float | None = None
    noise: float | None = None
    delta: float = 1e-5
    clip: float = 1.0
    quantile: float | None = None
    quantile_noise: float | None = None
    clip_step: float = 0.2
    smallest_weight: float = 1.0
    accountant: Accountant = "pld"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise is None:
            raise ConfigError(
                "[privacy] needs privacy.epsilon, the most to spend, or privacy.noise, a noise "
                "multiplier such as 1.0; give one, or leave the table out"
            )
        for name in ("epsilon", "noise", "clip", "quantile_noise", "clip_step", "smallest_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"privacy.{name} must be a positive number, not {value}")
        if self.noise is not None and self.noise < 1e-6:
            raise ConfigError(f"privacy.noise must be at least 1e-6, not {self.noise}")
        for name in ("delta", "quantile"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"privacy.{name} must be between 0 and 1, not {value}")
        if self.quantile is None and self.quantile_noise is not None:
            raise ConfigError(
                "privacy.quantile_noise hides the quantile that clip follows, and there is none; "
                "set privacy.quantile, or leave it out"
            )
