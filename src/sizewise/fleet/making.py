"""A fleet out of the `[fleet]` table: bytes for ratios, profiles for boards, shares for kinds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from sizewise.common.structure import nearest
from sizewise.errors import ConfigError
from sizewise.fleet.devices import (
    SCENARIOS,
    EventConfig,
    Fleet,
    FleetConfig,
    GroupConfig,
    class_name,
)
from sizewise.fleet.profiles import PROFILES


def make_fleet(
    config: FleetConfig,
    bytes_of_ratio: Callable[[float], int],
    bytes_of_scenario: Callable[[float], int] | None = None,
) -> Fleet:
    """Turn the `[fleet]` table into a fleet.

    The bytes that stand for a share of the model at hand are only asked for when ratios are used,
    because this has to look at the model; for the shares of a scenario they may be others.
    """
    if config.scenario and bytes_of_scenario is not None:
        bytes_of_ratio = bytes_of_scenario
    if config.scenario:
        shares = SCENARIOS[config.scenario]
        kinds = [GroupConfig(1, ratio=float(Fraction(share)), name=share) for share in shares]
    elif config.ratios:
        kinds = [GroupConfig(1, ratio=ratio) for ratio in config.ratios]
    else:
        kinds = [GroupConfig(1, memory) for memory in config.budgets or (None,)]
    dealt = _deal(config.devices, _profiled(kinds, config.profiles))
    groups = list(config.group) or dealt
    for index, group in enumerate(groups):
        if group.profile is not None:
            profile = PROFILES[group.profile]
            speed, bandwidth = group.speed or profile.speed, group.bandwidth or profile.bandwidth
            group = replace(group, speed=speed, bandwidth=bandwidth)
        memory, usual = group.memory, class_name(group.memory)
        if group.ratio is not None:
            usual = f"{group.ratio:g} model"
            memory = bytes_of_ratio(group.ratio) if memory is None else memory
        groups[index] = replace(group, memory=memory, name=group.name or group.model or usual)
    joined = [event for event in sorted(config.event, key=lambda e: e.round) if event.join]
    joins = (0,) * len(groups) + tuple(event.round - 1 for event in joined)
    groups += [GroupConfig(e.join, e.memory, class_name(e.memory)) for e in joined]
    _check_names(groups)
    upgrades = [upgrade for event in config.event for upgrade in _upgrades(event, groups)]
    changes = tuple(sorted(upgrades))
    return Fleet(tuple(groups), config.per_round, joins, changes, config.sampling)


def _profiled(kinds: list[GroupConfig], profiles: Sequence[str]) -> list[GroupConfig]:
    """Give kinds of devices their profiles: one each, or the same to all."""
    if not profiles:
        return kinds
    if len(profiles) not in (1, len(kinds)):
        raise ConfigError(
            f"fleet.profiles needs one name, or one for each of the {len(kinds)} budgets, "
            f"not {len(profiles)}"
        )
    each = list(profiles) * (len(kinds) // len(profiles))
    return [replace(kind, profile=name) for kind, name in zip(kinds, each, strict=True)]


def _check_names(groups: Sequence[GroupConfig]) -> None:
    """Raise unless each device class has one budget: results are given by class."""
    budgets: dict[str | None, int | None] = {}
    for group in groups:
        if budgets.setdefault(group.name, group.memory) != group.memory:
            raise ConfigError(
                f"two device classes with different memory are both called {group.name!r}; "
                f"give one of them another fleet.group.name"
            )


def _upgrades(
    event: EventConfig, groups: Sequence[GroupConfig]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield what an event changes in each group of its class, the first devices first."""
    if event.upgrade is None:
        return
    names = [group.name or "" for group in groups]
    if event.upgrade not in names:
        hint = nearest(event.upgrade, names)
        raise ConfigError(f"fleet.event.upgrade names no device class {event.upgrade!r}; {hint}")
    left = sum(group.count for group in groups) if event.count is None else event.count
    for index, group in enumerate(groups):
        if group.name == event.upgrade and left > 0:
            yield event.round - 1, index, min(left, group.count), event.memory
            left -= group.count


def _deal(devices: int, kinds: Sequence[GroupConfig]) -> list[GroupConfig]:
    """Give consecutive, equal shares of the devices to the kinds, as FeDepth does."""
    cuts = [-(-devices * i // len(kinds)) for i in range(len(kinds) + 1)]
    return [
        replace(kind, count=stop - start)
        for kind, start, stop in zip(kinds, cuts, cuts[1:], strict=False)
        if stop > start
    ]
