"""The fleet: who takes part, with how many bytes, and who is asked in a round.

A fleet is kept as its description (a few groups and events). A device is made when it is sampled,
so a million devices cost no more than the text that names them.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from sizewise.common.rng import numpy_generator, python_generator
from sizewise.common.structure import Bytes, nearest
from sizewise.errors import ConfigError
from sizewise.fleet.attacks import AttackConfig
from sizewise.fleet.profiles import PROFILES

SCENARIOS: dict[str, tuple[str, ...]] = {
    "fair": ("1/6", "1/3", "1/2", "1"),
    "lack": ("1/8", "1/6", "1/2", "1"),
    "surplus": ("1/6", "1/3", "1/2", "2"),
}
"""FeDepth's budgets, as shares of what training the whole model costs (docs/methods/fedepth.md).

Costs are as the paper counts them (`accounting.summary`), which is over twice what a step needs.
"""


Sampling = Literal["fixed", "poisson"]


@dataclass(frozen=True)
class Device:
    """One participant.

    Attributes:
        id: Its number; it also names its share of the data.
        group: Its device class, the key of `peak_bytes` and `budget_bytes` in results.
        memory: Its budget for one training step in bytes; None is unlimited.
        speed: FLOP per second, if known.
        bandwidth: Bytes per second, if known.
        ratio: The share of the model that its bytes stand for, if they were given as one.
        turn: How many devices were asked before it, in all rounds; where each is drawn by itself,
            how many there were, so that it does not depend on the others.
        model: The model that its owner named for it, if any.
    """

    id: int
    group: str
    memory: int | None = None
    speed: float | None = None
    bandwidth: float | None = None
    ratio: float | None = None
    turn: int = 0
    model: str | None = None


def ratio_of(device: Device) -> float:
    """Return a device's share of the model, for methods that are asked to go by it."""
    if device.ratio is None:
        raise ConfigError(
            "method.assign = 'ratio' needs a fleet that is given by ratios; "
            "use fleet.ratios or fleet.scenario, or assign = 'bytes'"
        )
    return device.ratio


@dataclass(frozen=True)
class GroupConfig:
    """Devices that are alike: `[[fleet.group]]`.

    Attributes:
        count: How many there are.
        memory: Their bytes; unlimited when left out.
        name: Their device class; default: their model, bytes or ratio.
        speed: FLOP per second.
        bandwidth: Bytes per second.
        ratio: Their share of the model; it becomes bytes unless these are given as well.
        model: A model of their own, by name, for methods whose devices may have different ones.
        profile: A listed kind of device, whose speed and bandwidth count where none are given.
        rate: With Poisson sampling, how likely each is asked in a round; default: as all others.
    """

    count: int
    memory: Bytes | None = None
    name: str | None = None
    speed: float | None = None
    bandwidth: float | None = None
    ratio: float | None = None
    model: str | None = None
    profile: str | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate <= 1:
            raise ConfigError(f"fleet.group.rate must be above 0 and at most 1, not {self.rate}")
        for name in ("speed", "bandwidth", "ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"fleet.group.{name} must be a positive number, not {value}")
        if self.profile is not None and self.profile not in PROFILES:
            hint = nearest(self.profile, PROFILES)
            raise ConfigError(f"unknown device profile {self.profile!r}; {hint}")
        if self.count < 1:
            raise ConfigError(f"fleet.group.count must be at least 1, not {self.count}")


@dataclass(frozen=True)
class EventConfig:
    """A change of the fleet from a round on: `[[fleet.event]]`.

    Attributes:
        round: The first round, counted from 1, in which the change holds.
        join: How many new devices join with `memory`.
        upgrade: Or: the name of a device class whose first `count` devices get `memory` instead.
        count: How many devices of the class are upgraded; all of them when left out.
        memory: The bytes of the new or upgraded devices.
    """

    round: int
    memory: Bytes
    join: int = 0
    upgrade: str | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if self.round < 1:
            raise ConfigError(f"fleet.event.round counts from 1, so it cannot be {self.round}")
        if (self.join > 0) == (self.upgrade is not None):
            raise ConfigError(
                "a fleet.event needs either join = N (new devices) or upgrade = 'class name'"
            )
        if self.count is not None and self.count < 1:
            raise ConfigError(
                f"fleet.event.count must be at least 1, not {self.count}; leave it out for all"
            )


@dataclass(frozen=True)
class FleetConfig:
    """The `[fleet]` table: devices, their budgets, and how many are asked each round.

    Attributes:
        devices: Size of the fleet when `group` is not used.
        per_round: Devices sampled each round.
        budgets: Dealt evenly over the devices, in order: the first share gets the first budget.
        ratios: Or shares of the model, dealt in the same way; they become bytes.
        scenario: Or one of FeDepth's scenarios, which are lists of ratios.
        group: Or explicit groups.
        event: Devices that join or are upgraded in mid-run.
        profiles: Kinds of devices for the simulated clock: one for each budget, or one for all.
        deadline: Simulated seconds after which a round ends; later updates are refused.
        attack: Devices that attack, in simulation.
        sampling: How devices are sampled: `fixed` draws just `per_round`, without replacement; with
            `poisson` each device is drawn by itself, and so many are expected, as accountants of
            privacy assume.
    """

    devices: int = 20
    per_round: int = 5
    budgets: tuple[Bytes, ...] = ()
    ratios: tuple[float, ...] = ()
    scenario: str | None = None
    group: tuple[GroupConfig, ...] = ()
    event: tuple[EventConfig, ...] = ()
    profiles: tuple[str, ...] = ()
    deadline: float | None = None
    attack: tuple[AttackConfig, ...] = ()
    sampling: Sampling = "fixed"

    def __post_init__(self) -> None:
        if self.deadline is not None and not self.deadline > 0:
            raise ConfigError(f"fleet.deadline must be positive seconds, not {self.deadline}")
        if self.profiles and self.group:
            raise ConfigError("fleet.profiles is for budgets; give each fleet.group its profile")
        if self.devices < 1 or self.per_round < 1:
            raise ConfigError("fleet.devices and fleet.per_round must be at least 1")
        if sum(map(bool, (self.budgets, self.ratios, self.scenario, self.group))) > 1:
            raise ConfigError(
                "give only one of fleet.budgets, fleet.ratios, fleet.scenario and fleet.group"
            )
        if self.scenario is not None and self.scenario not in SCENARIOS:
            hint = nearest(self.scenario, SCENARIOS)
            raise ConfigError(f"unknown fleet.scenario {self.scenario!r}; {hint}")
        if self.sampling == "fixed" and any(group.rate is not None for group in self.group):
            raise ConfigError(
                "fleet.group.rate is how likely a device is drawn by itself; set fleet.sampling = "
                "'poisson', or leave it out"
            )
        present = sum(group.count for group in self.group) or self.devices
        if self.per_round > present:
            raise ConfigError(
                f"fleet.per_round is {self.per_round}, but the fleet has only {present} devices; "
                f"lower it or add devices"
            )
        if 0 < present < len(self.budgets or self.ratios):
            raise ConfigError(
                f"{len(self.budgets or self.ratios)} budgets cannot be dealt to {present} devices"
            )


@dataclass(frozen=True)
class Fleet:
    """All devices, as a description.

    Attributes:
        groups: Groups in device order, joiners last.
        joins: The round (from 0) from which each group is there.
        upgrades: (round from 0, group index, devices of the group that change, bytes).
        per_round: Devices sampled each round.
        sampling: How they are.
    """

    groups: tuple[GroupConfig, ...]
    per_round: int
    joins: tuple[int, ...]
    upgrades: tuple[tuple[int, int, int, int], ...] = ()
    sampling: Sampling = "fixed"

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The number of each group's first device."""
        return (0, *accumulate(group.count for group in self.groups[:-1]))

    @property
    def total(self) -> int:
        """Devices that are ever there, joiners included: each has its own share of the data."""
        return self.starts[-1] + self.groups[-1].count

    def present(self, round_index: int) -> int:
        """Return how many devices are there in a round; they are numbered from 0."""
        return sum(
            group.count
            for group, join in zip(self.groups, self.joins, strict=True)
            if join <= round_index
        )

    def device(self, number: int, round_index: int) -> Device:
        """Make one device as it is in a round."""
        index = bisect_right(self.starts, number) - 1
        group = self.groups[index]
        own = name = group.name or class_name(group.memory)
        memory, ratio, model = group.memory, group.ratio, group.model
        for when, which, count, new in self.upgrades:
            # An upgrade is for devices that are still of the class it names.
            of_class = which == index and name == own
            if of_class and when <= round_index and number - self.starts[index] < count:
                memory, ratio, name, model = new, None, class_name(new), None
        return Device(number, name, memory, group.speed, group.bandwidth, ratio, model=model)

    def sample(self, seed: int, round_index: int) -> list[Device]:
        """Draw the devices of a round, in ascending order of their numbers."""
        if self.sampling == "poisson":
            return [self.listed(number, round_index) for number in self._each(seed, round_index)]
        present = self.present(round_index)
        generator = python_generator(seed, "sample", round_index)
        numbers = sorted(generator.sample(range(present), min(self.per_round, present)))
        before = round_index * self.per_round
        return [
            replace(self.device(number, round_index), turn=before + position)
            for position, number in enumerate(numbers)
        ]

    def _each(self, seed: int, round_index: int) -> Iterator[int]:
        """Draw each device by itself: how many of a group that gives, then which."""
        for start, group, join in zip(self.starts, self.groups, self.joins, strict=True):
            if join <= round_index:
                purpose = (seed, "sample", round_index, start)
                rate = self.rate(start, round_index)
                count = numpy_generator(*purpose).binomial(group.count, rate)
                members = range(start, start + group.count)
                yield from sorted(python_generator(*purpose).sample(members, int(count)))

    def rate(self, number: int, round_index: int) -> float:
        """Return how likely a device is asked in a round, where each is drawn by itself."""
        own = self.groups[bisect_right(self.starts, number) - 1].rate
        return min(1.0, self.per_round / self.present(round_index)) if own is None else own

    def listed(self, number: int, round_index: int) -> Device:
        """Make one device with the turn that it has where each is drawn by itself."""
        turn = round_index * self.present(round_index) + number
        return replace(self.device(number, round_index), turn=turn)

    def classes(self) -> Iterator[tuple[Device, int, int]]:
        """Yield one example device, the round it first appears in, and the number of its kind."""
        for index, (start, join) in enumerate(zip(self.starts, self.joins, strict=True)):
            yield self.device(start, join), join, self.groups[index].count
        done = [0] * len(self.groups)
        for when, index, count, _ in self.upgrades:
            # Devices that an earlier event took out of the class are not meant by this one.
            if count > done[index]:
                example = self.device(self.starts[index] + count - 1, when)
                yield example, when, count - done[index]
                done[index] = count

    def budgets(self) -> tuple[int | None, ...]:
        """Return the different budgets that devices ever have, smallest first, unlimited last."""
        found = {group.memory for group in self.groups} | {new for *_, new in self.upgrades}
        return tuple(sorted(found, key=lambda memory: math.inf if memory is None else memory))

    def ratios(self) -> tuple[float, ...]:
        """Return the different ratios that budgets were given as, ascending."""
        return tuple(sorted({g.ratio for g in self.groups if g.ratio is not None}))


def class_name(memory: int | None) -> str:
    """Return the name of the device class with this many bytes, e.g. "20MB"."""
    if memory is None:
        return "any"
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if memory >= size:
            return f"{memory / size:.12g}{unit}"
    return f"{memory}B"
