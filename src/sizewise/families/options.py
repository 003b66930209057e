"""What options of methods have in common."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.families.base import Method
from sizewise.fleet.devices import Device, ratio_of
from sizewise.training.task import Task

T = TypeVar("T")


@dataclass(frozen=True)
class AssignedOptions(Method.Options):
    """Options of methods that look at what a device can hold.

    Attributes:
        assign: Whether a device gets the largest that fits its bytes; or, to reproduce papers, what
            its ratio stands for, as the fleet gives it, whatever that costs.
    """

    assign: Literal["bytes", "ratio"] = "bytes"

    @property
    def ignores_budgets(self) -> bool:
        """Whether devices train more than their bytes hold."""
        return self.assign == "ratio"

    def capacity(self, device: Device) -> float | None:
        """Return what a device can hold: its bytes, None being unlimited, or its ratio."""
        return ratio_of(device) if self.assign == "ratio" else device.memory

    def capacities(self, task: Task) -> Sequence[float | None]:
        """Return what the devices of a fleet can hold, without repetitions, ascending."""
        return task.ratios if self.assign == "ratio" else task.budgets


def possible(choose: Callable[[Any], T], capacities: Iterable[float | None]) -> Iterator[T]:
    """Yield what is chosen for each capacity that is enough for something.

    A device with less is refused, and named, in the rounds that ask it.
    """
    for capacity in capacities:
        with suppress(BudgetTooSmall):
            yield choose(capacity)


def acts_only(options: Any, name: str, condition: str, holds: bool) -> None:
    """Raise ConfigError if an option of a method was set though it has no effect.

    Args:
        options: The method's options, a dataclass.
        name: The option.
        condition: When it acts, as it stands in a config: "method.levels = 'dynamic'".
        holds: Whether that is so.
    """
    (default,) = (field.default for field in fields(options) if field.name == name)
    if not holds and getattr(options, name) != default:
        raise ConfigError(
            f"method.{name} acts with {condition} only; set that, or leave method.{name} out"
        )
