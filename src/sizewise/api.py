"""The short way from Python: a model, data and budgets in, a run with its report out.

    import sizewise

    run = sizewise.federate("preresnet20", "digits", budgets=["2MB", "7MB"], method="fedepth")
    run.report("report.html")
    run.export("phone.safetensors", memory="20MB")

It is a config and a session underneath; those offer everything.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sizewise import config as configs
from sizewise import cuts, deployment, session
from sizewise.cuts import Cuts
from sizewise.data.dataset import Dataset
from sizewise.errors import ConfigError
from sizewise.federation import Observer
from sizewise.report import page, records
from sizewise.structure import parse_bytes


@dataclass(frozen=True)
class FinishedRun:
    """A run that got to its end.

    Attributes:
        folder: Its run folder.
        result: What `sizewise run --json` prints.
        dataset: The data, if it was given in memory.
    """

    folder: Path
    result: dict[str, Any]
    dataset: Dataset | None = None

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
        return deployment.export(self.folder, Path(out), budget, size, dataset=self.dataset)


def federate(
    model: str | Callable[..., nn.Module],
    data: str | Dataset = "digits",
    *,
    budgets: Sequence[str | int] = (),
    method: str = "fedavg",
    rounds: int = 20,
    out: str | Path | None = None,
    observe: Observer = lambda line, totals: None,
    **tables: Any,
) -> FinishedRun:
    """Train a model on a fleet of devices with these budgets.

    Args:
        model: A model of the zoo, or a function of a module that builds one.
        data: A listed data set or a parquet folder, or data that is in memory.
        budgets: Bytes of each device class, dealt evenly; none: unlimited.
        method: See `sizewise list methods`.
        rounds: How many.
        out: The run folder; default: a new one under `runs/`.
        observe: Called after each round with its line of the history and the totals.
        **tables: Further keys of the config: `seed=1`, `fleet={"devices": 40}`,
            `recipe={"lr": 0.05}`, `data_options={"partition": "iid"}`.
    """
    chosen = {
        **tables,
        "rounds": rounds,
        "model": {"name": _name(model), **tables.get("model_options", {})},
        "data": {**tables.get("data_options", {})},
        "fleet": {**tables.get("fleet", {})},
        "method": {"name": method, **tables.get("method_options", {})},
    }
    for name in ("model_options", "data_options", "method_options"):
        chosen.pop(name, None)
    if isinstance(data, str):
        chosen["data"]["name"] = data
    if budgets:
        chosen["fleet"]["budgets"] = list(budgets)
    config = configs.from_dict(chosen)
    given = data if isinstance(data, Dataset) else None
    with session.started(config, None if out is None else Path(out), given) as federation:
        if (found := cuts.read(federation.folder.path)) is not None:
            print(found, file=sys.stderr)
        return FinishedRun(federation.folder.path, federation.run(observe), given)


def _name(model: str | Callable[..., nn.Module]) -> str:
    """Return a model's name in a config."""
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"a model is built by a function or class at the top of a module, not by {model!r}; "
            "give it a name there"
        )
    return f"{model.__module__}:{name}"
