"""What a user gives from Python, understood: a config, and what a config cannot hold."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from sizewise import config as configs
from sizewise.common.structure import nearest
from sizewise.config import Config
from sizewise.data.dataset import Dataset
from sizewise.data.memory import implied
from sizewise.data.memory import understood as understood_data
from sizewise.errors import ConfigError
from sizewise.models import at_hand
from sizewise.models.memory import Given
from sizewise.models.memory import understood as understood_model

Budgets = str | float | Sequence[str | float] | None
"""Bytes of each device class, dealt evenly, or of all devices; None: unlimited."""


@dataclass(frozen=True)
class Memory:
    """What of a run is in memory, not in its folder.

    Attributes:
        dataset: The data, if it was given there.
        model: The model, if it was given as a module, function or class.
    """

    dataset: Dataset | None = None
    model: Given | None = None

    @property
    def empty(self) -> bool:
        """Whether a run finds all it needs by names, so that any process can carry it out."""
        return self.dataset is None and self.model is None

    def known_as(self, name: str) -> AbstractContextManager[None]:
        """Let a config's name stand for the model; another may be stored under it by now."""
        return nullcontext() if self.model is None else at_hand(name, self.model.make)


@dataclass(frozen=True)
class Arguments:
    """A task: the tables of its config, without a method, and what they name that is in memory."""

    tables: Mapping[str, Any]
    memory: Memory

    @property
    def name(self) -> str:
        """What the config calls the model."""
        found: str = self.tables["model"]["name"]
        return found

    def with_method(self, name: str, options: object) -> dict[str, Any]:
        """Return the tables with a method and its own options."""
        return {**self.tables, "method": {"name": name, **_beside("method", options)}}

    def config(self, method: str, options: object) -> Config:
        """Return the config of a run."""
        return configs.from_dict(self.with_method(method, options))


def gather(
    function: str, model: object, data: object, budgets: object, rounds: int, tables: dict[str, Any]
) -> Arguments:
    """Return what a function was given; it takes `method_options` of the tables itself.

    Raises:
        SizewiseError: Something is not understood.
    """
    known = (*_TABLES, *_OPTIONS, "method_options")
    for key in tables:
        if key not in known:
            raise ConfigError(f"{function} takes no {key!r}; {nearest(key, known)}")
    given = understood_model(model)
    own = given.table() if isinstance(given, Given) else {"name": given}
    own = {**own, **_beside("model", tables.get("model_options", {}))}
    reads = _beside("data", tables.get("data_options", {}))
    samples = understood_data(data, reads, own.get("weights"))
    follows = implied(samples)
    found = {
        **{key: tables[key] for key in _TABLES if key in tables},
        "rounds": rounds,
        "model": own,
        "data": {**follows["data"], **reads},
        "fleet": _fleet(tables.get("fleet", {}), budgets, follows["fleet"]),
    }
    dataset = None if isinstance(samples, str) else samples
    return Arguments(found, Memory(dataset, given if isinstance(given, Given) else None))


# What every function takes beside its own arguments.
_TABLES = ("seed", "fleet", "recipe", "engine", "stop", "privacy")
_OPTIONS = ("model_options", "data_options")


def _beside(what: str, options: object) -> Mapping[str, Any]:
    """Return the options of a model, data or method that were given beside its name."""
    if not isinstance(options, Mapping) or "name" in options:
        raise ConfigError(
            f"{what}_options is a dict of the keys beside {what}.name, not {options!r}"
        )
    return options


def _fleet(table: object, budgets: object, follows: Mapping[str, Any]) -> object:
    """Return the `[fleet]` table with the budgets; a single one is that of all devices."""
    if isinstance(table, Mapping) and "group" not in table:
        table = {**follows, **table}
    budgets = [] if budgets is None else budgets
    budgets = [budgets] if isinstance(budgets, str | int | float) else budgets
    if not isinstance(budgets, Sequence):
        raise ConfigError(f'budgets are a list such as ["2MB", "7MB"], not {budgets!r}')
    if not budgets or not isinstance(table, Mapping):
        return table
    if "budgets" in table:
        raise ConfigError("budgets are given twice, also in fleet; leave one of them out")
    return {**table, "budgets": list(budgets)}
