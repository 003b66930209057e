"""The fleet that a Flower run begins with: the config's, with the bytes that nodes have told."""

from collections.abc import Iterable
from dataclasses import replace

from sizewise.config import Config
from sizewise.fleet.devices import GroupConfig, class_name
from sizewise.flower.roster import Member
from sizewise.runs import preparation


def told(config: Config, members: Iterable[Member]) -> Config:
    """Return the config whose devices have the bytes that their nodes say they have.

    A device whose node said nothing, or is not there yet, keeps what the config gives it. The
    result is what the run folder keeps: budgets decide about sizes of models, so they are fixed
    for a run. A node that has less by the time it is asked refuses; one that has more, rests.
    """
    memories = {member.device: member.memory for member in members if member.memory is not None}
    if not memories:
        return config
    fleet = preparation.prepare(config).fleet
    groups: list[GroupConfig] = []
    for start, join, group in zip(fleet.starts, fleet.joins, fleet.groups, strict=True):
        for number in range(start, start + group.count) if join == 0 else ():
            memory = memories.get(number, group.memory)
            kind = replace(group, count=1)
            if memory != group.memory:
                kind = replace(kind, memory=memory, name=class_name(memory), ratio=None)
            if groups and replace(groups[-1], count=1) == kind:
                groups[-1] = replace(groups[-1], count=groups[-1].count + 1)
            else:
                groups.append(kind)
    if tuple(groups) == fleet.groups[: len(groups)]:
        return config
    chosen = replace(config.fleet, budgets=(), ratios=(), scenario=None, group=tuple(groups))
    return replace(config, fleet=chosen)
