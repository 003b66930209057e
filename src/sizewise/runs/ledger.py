"""The ledger of a private run: every noisy sum that left the server, and what they spend together.

`privacy.jsonl` in the run folder has a line for each release, and only grows. A round that is done
again after a crash is the same release if the same devices answered: it gets the same noise. If
others did, both may have been seen, so both count.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizewise.exchange import checkpoint
from sizewise.fleet.devices import Fleet
from sizewise.privacy import accounting
from sizewise.privacy.accounting import Spending
from sizewise.privacy.config import Accountant, PrivacyConfig

FILE = "privacy.jsonl"


@dataclass(frozen=True)
class Release:
    """One noisy sum that left the server: its round, from 0, its multiplier and its name."""

    round: int
    noise: float
    digest: str


def spendings(fleet: Fleet, releases: Iterable[tuple[int, float]]) -> list[Spending]:
    """Return what each group of a fleet spent in some rounds, given them and their multipliers."""
    listed = list(releases)
    return [
        Counter((fleet.rate(start, number), noise) for number, noise in listed if number >= join)
        for start, join in zip(fleet.starts, fleet.joins, strict=True)
    ]


def epsilons(
    spent: Sequence[Spending], config: PrivacyConfig, accountant: Accountant
) -> list[float]:
    """Return the epsilon of each spending; most groups have the same, which is computed once."""
    keys = [tuple(sorted(each.items())) for each in spent]
    found = {key: accounting.epsilon(dict(key), config.delta, accountant) for key in {*keys}}
    return [found[key] for key in keys]


class Ledger:
    """The releases of a run.

    Args:
        config: The `[privacy]` table, with its noise.
        fleet: Who is asked, at which rates.
        folder: The run folder.
    """

    def __init__(self, config: PrivacyConfig, fleet: Fleet, folder: Path) -> None:
        self.config, self._fleet, self._path = config, fleet, folder / FILE
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        self.releases = [Release(**json.loads(line)) for line in text.splitlines()]

    def note(self, release: Release) -> None:
        """Write down a release before anybody sees it."""
        if release in self.releases:
            return
        self.releases.append(release)
        lines = "".join(json.dumps(vars(each)) + "\n" for each in self.releases)
        checkpoint.write_bytes(self._path, lines.encode())

    def spent(self, accountant: Accountant) -> dict[str, float]:
        """Return the epsilon that devices of each class have spent so far, at most."""
        spent = spendings(self._fleet, ((r.round, r.noise) for r in self.releases))
        classes: dict[str, float] = {}
        each = epsilons(spent, self.config, accountant)
        for group, own in zip(self._fleet.groups, each, strict=True):
            name = group.name or "any"
            classes[name] = max(own, classes.get(name, 0.0))
        return classes

    def result(self) -> dict[str, Any]:
        """Return what a run's result says."""
        config = self.config
        each = {"pld": self.spent("pld"), "rdp": self.spent("rdp")}
        return {
            "epsilon": max(each[config.accountant].values()),
            "delta": config.delta,
            "accountant": config.accountant,
            "noise": config.noise,
            "releases": len(self.releases),
            "classes": {
                group: {name: found[group] for name, found in each.items()} for group in each["pld"]
            },
            "repeatable": config.seed is not None,
        }
