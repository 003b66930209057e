"""The private merge: clipped updates, noise on their sum, divided by what is expected of everybody.

Each round, with S the devices that answered, d_k the change that device k sends of its piece, and
w_e the expected number of devices that train entry e, which follows from the plans of the whole
fleet and the rates at which devices are asked, and so is public:

    d_k     <- d_k min(1, C / ||d_k||)                      one norm over all tensors of the piece
    theta_e <- theta_e + (sum_{k in S} d_k,e + z C n_e) / max(w_e, w_min)      n_e standard normal

One device more or less moves the vector of all sums by at most C, whatever its piece covers and
whoever else covers it: where pieces do not reach, a device adds 0. So the sums with their noise are
one Gaussian mechanism of multiplier z, and all that is made of them is post-processing. Dividing by
the number that came, as `coverage_mean` does, would be none.

Whether a tensor is a weight or a norm's statistic makes no difference: all that is sent is clipped
together. Whole numbers, such as counts of batches, keep their value.

With a quantile, C follows it (Andrew, Thakkar, McMahan, Ramaswamy: "Differentially Private Learning
with Adaptive Clipping", NeurIPS 2021, https://arxiv.org/abs/1905.03871):

    b <- (sum_{k in S} (1[||d_k|| <= C] - 1/2) + s n) / m + 1/2          m devices are expected
    C <- C exp(-eta (b - quantile))

The two sums together are a Gaussian mechanism of multiplier z if the noise on the updates has
multiplier z' = (z^-2 - (2 s)^-2)^(-1/2) (there, Theorem 1).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sizewise.errors import ConfigError
from sizewise.exchange.kept_apart import shared_name
from sizewise.exchange.view import Tensors, TensorSlice, View, grid
from sizewise.privacy.randomness import Secret

VARIANCE = "running_var"
"""How names of norms' variances end: noise must not make them negative."""


@dataclass(frozen=True)
class Bound:
    """How far one device may move the sum in a round, and how that is hidden.

    Attributes:
        clip: The largest norm of an update.
        noise: The multiplier z of all that is released.
        smallest_weight: What to divide by at least.
        quantile: The quantile of norms that `clip` follows; None: it stays.
        quantile_noise: Deviation of the noise on the count of norms below `clip`.
        step: How fast it follows.
    """

    clip: float
    noise: float
    smallest_weight: float = 1.0
    quantile: float | None = None
    quantile_noise: float = math.inf
    step: float = 0.2

    @property
    def noise_on_updates(self) -> float:
        """The multiplier z' of the noise on the sum of the updates."""
        if self.quantile is None:
            return self.noise
        left = self.noise**-2 - (2 * self.quantile_noise) ** -2
        if left <= 0:
            raise ConfigError(
                f"privacy.quantile_noise is {self.quantile_noise:g}, which alone spends more than "
                f"a noise of {self.noise:g} allows; give more than {self.noise / 2:g}"
            )
        return float(left**-0.5)


class PrivateMean:
    """Adds up clipped updates; gives the server's tensors, moved by their noisy sum.

    Args:
        tensors: The server's tensors.
        expected: For those that devices train, how many are expected to train each entry in a round
            (the entry of a tensor that broadcasts to its shape), or one number for all.
        devices: How many devices are expected to answer.
        bound: How updates are clipped and hidden.
        secret: Where noise comes from.
        round_index: Whose noise it is.
    """

    def __init__(
        self,
        tensors: Tensors,
        expected: Mapping[str, float | Tensor],
        devices: float,
        bound: Bound,
        secret: Secret,
        round_index: int,
    ) -> None:
        self._tensors, self._devices, self.bound = tensors, devices, bound
        self._secret, self._round = secret, round_index
        # In order of their names: what the noise is drawn for depends on it.
        trained = [name for name in sorted(expected) if tensors[name].is_floating_point()]
        self._expected = {name: expected[name] for name in trained}
        self._deviation = bound.noise_on_updates * bound.clip
        # In float64: what is rounded away must not depend on who else is there.
        self._sums = {
            name: torch.zeros(tensors[name].shape, dtype=torch.float64) for name in self._expected
        }
        self._below = 0.0

    def add(self, update: Tensors, view: View, weight: float) -> None:
        """Add one update, clipped; `weight` is not used: how many samples a device has is private.

        Args:
            update: Trained tensors by local name; a tensor that is not in it did not change.
            view: Where those tensors live on the server, each in a tensor of its own.
            weight: Not used.
        """
        changes: list[tuple[TensorSlice, Tensor]] = []
        for local, tensor in update.items():
            place = view[local]
            if place.name in self._sums:
                changes.append((place, tensor.double() - place.read(self._tensors).double()))
        norm = math.sqrt(sum(float(change.square().sum()) for _, change in changes))
        if not math.isfinite(norm):
            return  # Nothing that could be clipped.
        clip = self.bound.clip
        self._below += 0.5 if norm <= clip else -0.5
        for place, change in changes:
            if norm > clip:
                change *= clip / norm
            _add_at(place, self._sums[place.name], change)

    def result(self) -> dict[str, Tensor]:
        """Return all server tensors: moved where somebody was expected, else the old ones."""
        return {name: self._moved(name, old) for name, old in self._tensors.items()}

    def covered(self, name: str) -> bool | Tensor:
        """Return whether a tensor is expected to be trained; where only parts are, which."""
        weight = self._expected.get(name, 0.0)
        if isinstance(weight, float):
            return weight > 0
        return (weight > 0).expand(self._tensors[name].shape)

    @cached_property
    def digest(self) -> str:
        """A name of what is to be released, once all is added, for those who have the key.

        Noise is drawn for it: a round that is done again gets the same noise if it is the same, and
        other noise if other devices answered. The same noise on two sums would hide neither.
        """
        below = ("", torch.tensor(self._below, dtype=torch.float64))
        # Fixed by this: how it is hidden must be part of the name, too.
        purpose = (self._round, self._deviation, self.bound.quantile_noise)
        return self._secret.digest([below, *self._sums.items()], *purpose)

    @property
    def next_clip(self) -> float:
        """The largest norm of an update in the next round."""
        bound = self.bound
        if bound.quantile is None or not self._devices:
            return bound.clip
        noise = bound.quantile_noise * float(self._secret.normal((), "norms", self.digest))
        share = (self._below + noise) / self._devices + 0.5
        return bound.clip * math.exp(-bound.step * (share - bound.quantile))

    def _moved(self, name: str, old: Tensor) -> Tensor:
        weight = self._expected.get(name)
        if weight is None:
            return old
        noise = self._secret.normal(old.shape, "noise", self.digest, name)
        total = self._sums[name] + self._deviation * noise
        least = self.bound.smallest_weight
        if isinstance(weight, Tensor):
            moved = old.double() + total / weight.double().clamp(min=least)
            moved = torch.where(weight > 0, moved, old.double())
        else:
            moved = old.double() + total / max(weight, least)
        if shared_name(name).endswith(VARIANCE):
            moved.clamp_(min=0.0)
        return moved.to(old.dtype)


def _add_at(place: TensorSlice, total: Tensor, change: Tensor) -> None:
    """Add a change to the entries of a total where it belongs."""
    if place.index is None:
        total += change
        return
    total[grid(place.index, total.shape)] += change
