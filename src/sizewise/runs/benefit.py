"""Who benefits: how well each device is served by the model that it runs, on its own samples.

A device's samples are those that it keeps to validate on (`data.validation`). Its model is the
deployed one of the size that it trains; docs/who-benefits.md says why. Samples of all devices that
run a model are answered together, in batches; the figures of a device are sums over its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from sizewise.data.partitions import Shards
from sizewise.engines import Engine
from sizewise.errors import BudgetTooSmall
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.fleet.devices import Device, Fleet
from sizewise.training import evaluation
from sizewise.training.evaluation import Score

MOST = 10_000
"""Devices that are looked at; of a larger fleet so many, at equal distances."""


@dataclass(frozen=True)
class Served:
    """A device, and what it gets: the share of right answers of its model on its samples."""

    device: int
    group: str
    size: str
    samples: int
    accuracy: float


@dataclass(frozen=True)
class Benefit:
    """What devices get at some moment of a run.

    Attributes:
        score: The metric over the samples of all devices; where silos have labels of their own, in
            the mean over them.
        devices: Each device, in order; none where samples have scores, not classes or tags.
    """

    score: float
    devices: tuple[Served, ...]

    def summary(self) -> dict[str, Any]:
        """Return what the history says of it: figures over all devices, and class by class."""
        if not self.devices:
            return {"score": self.score}
        groups: dict[str, list[float]] = {}
        for served in self.devices:
            groups.setdefault(served.group, []).append(served.accuracy)
        classes = {group: figures(accuracies) for group, accuracies in groups.items()}
        overall = figures([served.accuracy for served in self.devices])
        return {"score": self.score, **overall, "classes": classes}


def figures(accuracies: Sequence[float]) -> dict[str, float]:
    """Return the mean of devices' accuracies, that of the worst tenth, and their deviation.

    The tenth is rounded up, so it is never empty. The deviation is that of these devices, not an
    estimate for others.
    """
    worst = sorted(accuracies)[: -(-len(accuracies) // 10)]
    return {
        "devices": len(accuracies),
        "mean": fmean(accuracies),
        "worst_tenth": fmean(worst),
        "deviation": pstdev(accuracies),
    }


@dataclass(frozen=True)
class Validation:
    """The samples that the devices of a fleet validate on."""

    fleet: Fleet
    partition: Shards

    @cached_property
    def rows(self) -> dict[int, Tensor]:
        """The samples of each device that is looked at and has some, by its number."""
        total = self.fleet.total
        numbers = range(total) if total <= MOST else (total * i // MOST for i in range(MOST))
        found = {number: self.partition.validation(number) for number in numbers}
        return {number: rows for number, rows in found.items() if len(rows)}

    def measured(
        self, method: Method, engine: Engine, state: State, round_index: int
    ) -> Benefit | None:
        """Return what devices get from a state; None if no device has both samples and a model."""
        present = self.fleet.present(round_index)
        devices = [self.fleet.device(n, round_index) for n in self.rows if n < present]
        parts: dict[str, list[Device]] = {}
        for device, name in models_of(method, state, devices, round_index).items():
            parts.setdefault(name, []).append(device)
        if not parts:
            return None
        # In the order of the data, so that a batch mixes devices as one of the test set does.
        rows = {
            name: torch.unique(torch.cat([self.rows[device.id] for device in some]))
            for name, some in parts.items()
        }
        scores = engine.validate(state, rows)
        task, served = method.task, []
        for name, some in parts.items():
            served += self._served(name, some, rows[name], scores[name])
        values = evaluation.total(list(scores.values())).values(task.metric, len(task.silos) or 1)
        return Benefit(fmean(values), tuple(sorted(served, key=lambda one: one.device)))

    def _served(
        self, name: str, devices: Sequence[Device], rows: Tensor, score: Score
    ) -> list[Served]:
        """Return devices that run one model, given the rows that it answered, and how well."""
        if not score.asked:
            return []
        own = [self.rows[device.id] for device in devices]
        places = torch.searchsorted(rows, torch.cat(own))
        owner = torch.arange(len(own)).repeat_interleave(torch.tensor([len(one) for one in own]))
        right, asked = (
            torch.bincount(owner, torch.tensor(counts)[places], len(own)).tolist()
            for counts in (score.right, score.asked)
        )
        return [
            Served(device.id, device.group, name, len(own[n]), right[n] / asked[n])
            for n, device in enumerate(devices)
            if asked[n]  # A text may have no tag at all.
        ]


def models_of(
    method: Method, state: State, devices: Sequence[Device], round_index: int
) -> dict[Device, str]:
    """Return what the models of devices are called; devices that have none are left out.

    Where devices have models of their own, it is that. Else it is the deployed model of the size
    that a device trains or, if that is not deployed, the last one, which the method is about. A
    device that lacks the bytes to train runs what the weakest device runs that can.
    """
    deployed = method.deploy(state)
    owned = {model.owner: name for name, model in deployed.items() if model.owner is not None}
    if owned:
        return {device: owned[device.id] for device in devices if device.id in owned}
    kinds = {device: replace(device, id=0) for device in devices}
    *_, main = deployed
    found: dict[Device, str] = {}
    for kind in dict.fromkeys(kinds.values()):
        try:
            label = method.size_of(method.plan_upper_bound(state, kind, round_index)).label
        except BudgetTooSmall:
            continue
        found[kind] = label if label in deployed else main
    weakest = min(found, key=_bytes, default=None)
    otherwise = main if weakest is None else found[weakest]
    return {device: found.get(kind, otherwise) for device, kind in kinds.items()}


def _bytes(device: Device) -> float:
    return inf if device.memory is None else device.memory
