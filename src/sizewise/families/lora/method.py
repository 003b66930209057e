"""Adapters by bytes: the base of methods that fine-tune a frozen model.

A device's bytes decide the rank of its adapters, and in how many of the last blocks it has some:
what lies below the first of them needs no gradient and keeps nothing for the backward pass. The
base is counted once, as it is stored, and never travels; adapters and the head do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Plan
from sizewise.exchange.state import State
from sizewise.families.base import Method
from sizewise.families.lora.adapters import Rank
from sizewise.families.lora.options import AdapterOptions
from sizewise.families.lora.submodels import AdapterSubmodels
from sizewise.families.options import possible
from sizewise.fleet.devices import Device
from sizewise.memory.packing import largest_fitting
from sizewise.training.task import Task


@dataclass(frozen=True)
class Ranks:
    """What the server notes: the submodels that some device trains, smallest first."""

    trained: tuple[Rank, ...]


class LowRank(Method):
    """Adapters of the largest rank that fits; factors are averaged one by one.

    Attributes:
        one_rank: Whether all devices have the same rank: that of the weakest.
        fixed: Endings of names of tensors of an adapter that stay as they are drawn.
        plain_server: Whether the server takes merged adapters as they are, because entries do not
            mean the same from round to round and an optimiser on the server has no meaning.
    """

    submodel_type: type[Rank] = Rank
    holds_base = True
    one_rank: bool = False
    fixed: tuple[str, ...] = ()
    plain_server: bool = False

    @dataclass(frozen=True)
    class Options(AdapterOptions):
        """Options of all methods with adapters."""

    options: Options

    def __init__(self, task: Task, options: Any = None) -> None:
        super().__init__(task, options)
        name, recipe = type(self).__name__.lower(), task.recipe
        if recipe.eval_memory is not None:
            raise ConfigError(f"{name} cannot evaluate within recipe.eval_memory; leave it out")
        if recipe.norm not in ("batch", "tracked"):
            raise ConfigError(
                f"{name} holds the norms of the base as they are, so recipe.norm = "
                f"{recipe.norm!r} means nothing; leave it out"
            )
        if type(self).merging is not Method.merging and recipe.merge != "mean":
            raise ConfigError(
                f"{name} merges both factors of an adapter at once, where recipe.merge = "
                f"{recipe.merge!r} looks at single entries; use 'mean', or fedlora or ffa-lora"
            )
        if self.plain_server and (recipe.server != "fedavg" or recipe.server_lr != 1.0):
            raise ConfigError(
                f"{name} makes new factors in every round, of which recipe.server = "
                f"{recipe.server!r} could remember nothing; use 'fedavg' with server_lr 1"
            )

    @cached_property
    def submodels(self) -> AdapterSubmodels:
        """Adapters around one base."""
        return AdapterSubmodels(self.task, self.options, self.fixed)

    # ---- who trains what

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """In how many of the last blocks devices may have adapters, ascending; (0,): in all."""
        count = len(self.submodels.places.blocks)
        if self.options.depths and max(self.options.depths) > count:
            raise ConfigError(
                f"method.depths has {max(self.options.depths)}, and the model has layers to adapt "
                f"in {count} blocks"
            )
        # All blocks are the same submodel by whatever number they are asked for.
        return tuple(sorted({d if d < count else 0 for d in self.options.depths}, key=_deep)) or (
            0,
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that devices may get, ascending."""
        choices = tuple(sorted(set(self.options.ranks)))
        if not self.one_rank or len(choices) == 1:
            return choices
        found = (self._ranks_in(memory, self.depths[0], choices) for memory in self.task.budgets)
        return (next((rank for rank in found if rank is not None), choices[0]),)

    def _ranks_in(self, memory: int | None, depth: int, choices: Sequence[int]) -> int | None:
        """Return the largest rank whose step fits some bytes; None if none does."""
        return largest_fitting(choices, lambda rank: self.levers.least(Rank(rank, depth)), memory)

    def largest(self, memory: int | None) -> Rank:
        """Return what a device with some bytes trains: the most blocks, then the largest rank.

        Raises:
            BudgetTooSmall: Nothing fits.
        """
        for depth in reversed(self.depths):
            rank = self._ranks_in(memory, depth, self.ranks)
            if rank is not None:
                return Rank(rank, depth)
        least = Rank(self.ranks[0], self.depths[0])
        what = f"one training step of adapters of {least.label}"
        raise BudgetTooSmall(memory or 0, self.levers.least(least), what)

    def trained(self) -> Sequence[Rank]:
        """Return what devices of the fleet train, smallest first."""
        found = set(possible(self.largest, self.task.budgets)) or {
            Rank(self.ranks[0], self.depths[0])
        }
        return sorted(found, key=lambda one: (_deep(one.depth), one.rank))

    @cached_property
    def main(self) -> Rank:
        """All blocks and all rows that some device trains."""
        found = self.trained()
        return Rank(max(one.rank for one in found), found[-1].depth)

    def setup(self) -> State:
        """Return the adapters as they are drawn, and which of them devices train."""
        return super().setup().noting(Ranks(tuple(self.trained())))

    def plan(self, state: State, device: Device, round_index: int) -> Plan:
        """Give a device the largest rank, or the most blocks, that it can hold."""
        memory = None if self.options.ignores_budgets else device.memory
        return self.offer(device, round_index, self.largest(memory))

    def sizes(self, state: State) -> Sequence[Rank]:
        """Return what devices train, and the whole if no device does."""
        trained = state.facts(Ranks).trained
        whole = Rank(max(one.rank for one in trained), trained[-1].depth)
        return trained if whole in trained else (*trained, whole)


def _deep(depth: int) -> float:
    """Return a number that grows with a depth, of which 0 is all blocks."""
    return depth or float("inf")
