"""The short way from Python: a model, data and budgets in, a run with its report out.

    import sizewise

    run = sizewise.federate("preresnet20", "digits", budgets=["2MB", "7MB"], method="fedepth")
    run.report("report.html")
    run.export("phone.safetensors", memory="20MB")

It is a config and a session underneath; those offer everything.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sizewise import config as configs
from sizewise.common.structure import nearest, parse_bytes
from sizewise.data.dataset import Dataset
from sizewise.data.memory import implied, understood
from sizewise.errors import ConfigError
from sizewise.models import at_hand
from sizewise.report import page, records
from sizewise.runs import cuts, deployment, session
from sizewise.runs.cuts import Cuts
from sizewise.runs.federation import Observer


@dataclass(frozen=True)
class FinishedRun:
    """A run that got to its end.

    Attributes:
        folder: Its run folder.
        result: What `sizewise run --json` prints.
        dataset: The data, if it was given in memory.
        model: What builds the model, if it was given as a function or class.
    """

    folder: Path
    result: dict[str, Any]
    dataset: Dataset | None = None
    model: Callable[..., nn.Module] | None = None

    @property
    def accuracy(self) -> float:
        """Of the main deployed model on the test set, 0 to 1."""
        found: float = self.result["accuracy"]
        return found

    @property
    def cuts(self) -> Cuts | None:
        """How much of the model shrinks with the width, and what does not; None if nothing is cut.

        `print(run.cuts)` says it in a sentence.
        """
        return cuts.read(self.folder)

    def report(self, out: str | Path = "report.html") -> Path:
        """Write its report, one HTML file, and return where."""
        Path(out).write_text(page.html(records.read([self.folder])), encoding="utf-8")
        return Path(out)

    def export(
        self, out: str | Path, memory: str | int | None = None, size: str | None = None
    ) -> dict[str, Any]:
        """Write the model that fits so many bytes, or a named size; see `deployment.export`."""
        budget = None if memory is None else parse_bytes(memory)
        # A notebook may have another function of that name by now.
        known = (
            nullcontext()
            if self.model is None
            else at_hand(":".join(_place(self.model)), self.model)
        )
        with known:
            return deployment.export(self.folder, Path(out), budget, size, dataset=self.dataset)


def federate(
    model: str | Callable[..., nn.Module],
    data: Any = "digits",
    *,
    budgets: str | float | Sequence[str | float] | None = None,
    method: str = "fedavg",
    rounds: int = 20,
    out: str | Path | None = None,
    observe: Observer = lambda line, totals: None,
    **tables: Any,
) -> FinishedRun:
    """Train a model on a fleet of devices with these budgets.

    Args:
        model: A model of the zoo, or a function of a module that builds one.
        data: A listed data set, a folder or file, a torch or Hugging Face data set, a pandas frame,
            arrays, or such data of each device; see docs/own-data.md.
        budgets: Bytes of each device class, dealt evenly, or of all devices; none: unlimited.
        method: See `sizewise list methods`.
        rounds: How many.
        out: The run folder; default: a new one under `runs/`.
        observe: Called after each round with its line of the history and the totals.
        **tables: Further keys of the config: `seed=1`, `fleet={"devices": 40}`,
            `recipe={"lr": 0.05}`, `engine={"workers": 2}`; and what goes beside the names of model,
            data and method: `data_options={"partition": "iid"}`.

    Raises:
        SizewiseError: Something cannot be used as it stands; nothing is written then.
    """
    for key in tables:
        if key not in (*_TABLES, *_OPTIONS):
            raise ConfigError(f"federate takes no {key!r}; {nearest(key, (*_TABLES, *_OPTIONS))}")
    reads = _options(tables, "data_options")
    given = understood(data, reads, _options(tables, "model_options").get("weights"))
    follows = implied(given)
    config = configs.from_dict(
        {
            **{key: tables[key] for key in _TABLES if key in tables},
            "rounds": rounds,
            "model": {"name": _name(model), **_options(tables, "model_options")},
            "data": {**follows["data"], **reads},
            "method": {"name": method, **_options(tables, "method_options")},
            "fleet": _fleet(tables.get("fleet", {}), budgets, follows["fleet"]),
        }
    )
    dataset = given if isinstance(given, Dataset) else None
    with session.started(config, None if out is None else Path(out), dataset) as federation:
        if (found := cuts.read(federation.folder.path)) is not None:
            print(found, file=sys.stderr)
        result, builder = federation.run(observe), None if isinstance(model, str) else model
        return FinishedRun(federation.folder.path, result, dataset, builder)


# What `federate` takes beside its own arguments.
_TABLES = ("seed", "fleet", "recipe", "engine")
_OPTIONS = ("model_options", "data_options", "method_options")


def _options(tables: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the options of a model, data or method that were given beside its name."""
    options = tables.get(key, {})
    if not isinstance(options, Mapping) or "name" in options:
        what = key.removesuffix("_options")
        raise ConfigError(f"{key} is a dict of the keys beside {what}.name, not {options!r}")
    return options


def _fleet(
    table: object,
    budgets: str | float | Sequence[str | float] | None,
    follows: Mapping[str, Any],
) -> object:
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


def _name(model: object) -> str:
    """Return a model's name in a config; raise unless whoever imports it finds the model there."""
    if isinstance(model, str):
        return model
    module, came = _place(model)
    found = getattr(sys.modules.get(module), came, None)
    if isinstance(model, nn.Module) or not callable(model) or found is not model:
        built = "a built " if isinstance(model, nn.Module) else ""
        raise ConfigError(
            "model is a name, or a function or class at the top of a module that builds one, as "
            f"each size is built anew; {built}{came} came: give its class, or write such a function"
        )
    return f"{module}:{came}"


def _place(model: object) -> tuple[str, str]:
    """Return the module of a function or class, and its name there."""
    name = getattr(model, "__qualname__", type(model).__qualname__)
    return getattr(model, "__module__", ""), name
