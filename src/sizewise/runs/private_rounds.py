"""Rounds of a private run: what is expected of everybody, clipped updates, noise, and its key.

`privacy.key` in the run folder is where noise comes from, and who is asked: not for others to read.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sizewise.config import Config
from sizewise.errors import BudgetTooSmall, CheckpointError, ConfigError
from sizewise.exchange.coverage_mean import EntryWeights
from sizewise.exchange.plan import Submodel, Update
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.fleet.devices import Device, Fleet
from sizewise.privacy import accounting
from sizewise.privacy.config import PrivacyConfig
from sizewise.privacy.private_mean import Bound, PrivateMean
from sizewise.privacy.randomness import KEY_BYTES, Secret
from sizewise.runs.ledger import Ledger, Release, epsilons, spendings

KEY = "privacy.key"


@dataclass(frozen=True)
class Clipping:
    """What the server notes: the largest norm of an update in the next round."""

    clip: float


@dataclass(frozen=True)
class Expected:
    """What is known of a round before anybody answers.

    Attributes:
        devices: How many devices that can take part are expected to be asked.
        weights: How many are expected to train each entry, by server tensor.
    """

    devices: float
    weights: Mapping[str, float | Tensor]


def everyone(fleet: Fleet, round_index: int) -> Iterator[Device]:
    """Yield all devices of a round as they would be asked."""
    return (fleet.listed(number, round_index) for number in range(fleet.present(round_index)))


def expected(method: Method, fleet: Fleet, state: State, round_index: int) -> Expected:
    """Return what a round is expected to train: plans of all devices, by their rates.

    Plans follow from the round, from budgets and from the state, which earlier rounds released;
    that is why this may be known, and how many answered may not.

    Raises:
        ConfigError: Two tensors of a submodel live in one of the server.
    """
    shares: dict[tuple[Submodel, frozenset[str]], float] = defaultdict(float)
    for device in everyone(fleet, round_index):
        try:
            plan = method.plan(state, device, round_index)
        except BudgetTooSmall:
            continue
        key = plan.submodel, method.submodels.trained_names(plan)
        shares[key] += fleet.rate(device.id, round_index)
    weights: dict[str, EntryWeights] = {}
    for (submodel, names), rate in shares.items():
        view = method.submodels.view(submodel)
        if len({view[local].name for local in names}) < len(names):
            raise ConfigError(
                f"[privacy] cannot hold with the {submodel.label} model: two of its tensors are "
                f"one on the server, so its update could count twice; use another method"
            )
        for local in names:
            place = view[local]
            own = weights.setdefault(place.name, EntryWeights(state.tensors[place.name]))
            own.add(place.index, rate)
    return Expected(sum(shares.values()), {name: own.total() for name, own in weights.items()})


def settled(config: Config, fleet: Fleet) -> Config:
    """Return the config with the noise that its epsilon asks for.

    Raises:
        ConfigError: It has both, and that noise is too small.
    """
    privacy = config.privacy
    if privacy is None:
        return config
    if privacy.epsilon is not None:
        privacy = _within(privacy, privacy.epsilon, config.rounds, fleet)
    if privacy.quantile_noise is not None:
        _ = bound(privacy, privacy.clip, 0.0).noise_on_updates  # Raises if there is too little.
    return replace(config, privacy=privacy)


def _within(privacy: PrivacyConfig, target: float, rounds: int, fleet: Fleet) -> PrivacyConfig:
    """Return privacy with the noise that keeps all rounds within an epsilon."""

    def spent(noise: float) -> float:
        planned = ((number, noise) for number in range(rounds))
        return max(epsilons(spendings(fleet, planned), privacy, privacy.accountant))

    if privacy.noise is None:
        return replace(privacy, noise=accounting.smallest_noise(spent, target))
    if spent(privacy.noise) > target:
        raise ConfigError(
            f"{rounds} rounds with a noise of {privacy.noise:g} spend an epsilon of "
            f"{spent(privacy.noise):.4g}, more than privacy.epsilon = {target:g}; run fewer "
            f"rounds, raise one of them, or leave out privacy.noise"
        )
    return privacy


def bound(config: PrivacyConfig, clip: float, devices: float) -> Bound:
    """Return how a round with some clip is hidden, in which so many devices are expected."""
    noise = config.noise or 0.0
    usual = max(devices / 20, noise)
    return Bound(
        clip,
        noise,
        config.smallest_weight,
        config.quantile,
        usual if config.quantile_noise is None else config.quantile_noise,
        config.clip_step,
    )


class PrivateRounds:
    """What the server does in the rounds of a private run.

    Args:
        config: The table, with its noise.
        method: What is trained; its merge is replaced.
        fleet: By whom.
        folder: The run folder.
    """

    def __init__(self, config: PrivacyConfig, method: Method, fleet: Fleet, folder: Path) -> None:
        self.config, self._method, self._fleet = config, method, fleet
        self._ledger = Ledger(config, fleet, folder)
        self._secret = _secret(config, folder, known=bool(self._ledger.releases))

    @property
    def seed(self) -> int:
        """What decides who is asked, in place of the run's seed, which others may know."""
        return self._secret.whole_number("who is asked")

    def merge(self, state: State, updates: Iterable[Update], round_index: int) -> State:
        """Return the next state: the method's merge, of clipped updates and noise."""
        mean = self._mean(state, round_index)
        with _merging(self._method, lambda _: mean):
            merged = self._method.merge(state, updates)
        self._ledger.note(Release(round_index, mean.bound.noise, mean.digest))
        return merged.noting(Clipping(mean.next_clip))

    def _mean(self, state: State, round_index: int) -> PrivateMean:
        known = Clipping.__name__ in state.metadata
        clip = state.facts(Clipping).clip if known else self.config.clip
        there = expected(self._method, self._fleet, state, round_index)
        return PrivateMean(
            state.tensors,
            there.weights,
            there.devices,
            bound(self.config, clip, there.devices),
            self._secret,
            round_index,
        )

    def line(self, state: State) -> dict[str, Any]:
        """Return what a round's line of the history says."""
        clip = state.facts(Clipping).clip
        spent = self._ledger.spent(self.config.accountant)
        return {"epsilon": spent, "delta": self.config.delta, "next_clip": clip}

    def result(self) -> dict[str, Any]:
        """Return what a run's result says."""
        return self._ledger.result()


@contextmanager
def _merging(method: Method, merger: Callable[[State], PrivateMean]) -> Iterator[None]:
    """Let a method merge by something else for a while."""
    method.merger = merger
    try:
        yield
    finally:
        method.merger = None


def _secret(config: PrivacyConfig, folder: Path, known: bool) -> Secret:
    """Return the run's secret; a new run draws it."""
    if config.seed is not None:
        return Secret.of_seed(config.seed)
    path = folder / KEY
    if path.exists() and len(key := path.read_bytes()) == KEY_BYTES:
        return Secret(key)
    if known:
        raise CheckpointError(
            f"{str(path)!r} is gone or damaged, and with it what the noise of earlier rounds was "
            f"drawn from; put it back, or start a new run"
        )
    secret, draft = Secret.fresh(), folder / ".privacy.key.tmp"
    descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret.key)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    return secret
