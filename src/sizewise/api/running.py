"""One run from Python: `federate` starts it, `resume` goes on with it, `FinishedRun` has it all."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sizewise.api.arguments import Budgets, Memory, gather
from sizewise.common.structure import parse_bytes, plain
from sizewise.config import Config
from sizewise.data.dataset import Dataset
from sizewise.data.memory import understood as understood_data
from sizewise.errors import ConfigError
from sizewise.models.memory import Given
from sizewise.models.memory import understood as understood_model
from sizewise.report import page, records, tables
from sizewise.runs import cuts, deployment, resuming, session
from sizewise.runs.cuts import Cuts
from sizewise.runs.federation import Federation, Observer


@dataclass(frozen=True, repr=False)
class FinishedRun:
    """A run that got to its end. It prints as `sizewise run` shows it.

    Attributes:
        folder: Its run folder.
        result: What `sizewise run --json` prints.
        memory: What it was given that is not in the folder.
    """

    folder: Path
    result: dict[str, Any]
    memory: Memory = field(default_factory=Memory)

    @property
    def accuracy(self) -> float:
        """Of the main deployed model on the test set, 0 to 1."""
        found: float = self.result["accuracy"]
        return found

    @property
    def dataset(self) -> Dataset | None:
        """The data, if it was given in memory."""
        return self.memory.dataset

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry a round, as in `history.jsonl`; `pandas.DataFrame(run.history)` is a frame."""
        return list(records.lines(self.folder / "history.jsonl"))

    @property
    def cuts(self) -> Cuts | None:
        """How much of the model shrinks with the width, and what does not; None if nothing is cut.

        `print(run.cuts)` says it in a sentence.
        """
        return cuts.read(self.folder)

    def model(self, size: str | None = None, best: bool = False) -> nn.Module:
        """Return the trained model of a deployed size, in evaluation mode.

        Args:
            size: One of `result["sizes"]`; default: the main one.
            best: Of the round with the best validation score, not of the last one.
        """
        with self._known():
            return deployment.trained(self.folder, size, self.dataset, best)

    def report(self, out: str | Path = "report.html") -> Path:
        """Write its report, one HTML file, and return where."""
        return page.write([self.folder], Path(out))

    def export(
        self,
        out: str | Path,
        memory: str | int | None = None,
        size: str | None = None,
        best: bool = False,
    ) -> dict[str, Any]:
        """Write the model that fits so many bytes, or a named size; see `deployment.export`."""
        budget = None if memory is None else parse_bytes(memory)
        with self._known():
            return deployment.export(
                self.folder, Path(out), budget, size, dataset=self.dataset, best=best
            )

    def _known(self) -> AbstractContextManager[None]:
        return self.memory.known_as(resuming.read(self.folder).model.name)

    def __repr__(self) -> str:
        """Return its models, its device classes, and who was refused, as tables."""
        return tables.text(partial(tables.show_result, self.result))


def federate(
    model: object,
    data: object = "digits",
    *,
    budgets: Budgets = None,
    method: str = "fedavg",
    rounds: int = 20,
    out: str | Path | None = None,
    observe: Observer = lambda line, totals: None,
    callbacks: Sequence[Observer] = (),
    **tables: Any,
) -> FinishedRun:
    """Train a model on a fleet of devices with these budgets.

    Args:
        model: A model of the zoo, a `nn.Module`, whose weights are where the run starts, or a
            function or class that builds one.
        data: A listed data set, a folder or file, a torch or Hugging Face data set, a pandas frame,
            arrays, or such data of each device; see docs/own-data.md.
        budgets: Bytes of each device class, dealt evenly, or of all devices; none: unlimited.
        method: See `sizewise list methods`.
        rounds: How many.
        out: The run folder; default: a new one under `runs/`.
        observe: Called after each round with its line of the history and the totals.
        callbacks: Further functions that are called like `observe`, in this order. If one returns
            True, the run ends with that round.
        **tables: Further keys of the config: `seed=1`, `fleet={"devices": 40}`,
            `recipe={"lr": 0.05}`, `engine={"workers": 2}`; and what goes beside the names of model,
            data and method: `data_options={"partition": "iid"}`.

    Raises:
        SizewiseError: Something cannot be used as it stands; nothing is written then.
    """
    given = gather("federate", model, data, budgets, rounds, tables)
    config = given.config(method, tables.get("method_options", {}))
    observers = _checked(observe, *callbacks)
    place = None if out is None else Path(out)
    with (
        given.memory.known_as(given.name),
        session.started(config, place, given.memory.dataset) as federation,
    ):
        if (found := cuts.read(federation.folder.path)) is not None:
            print(found, file=sys.stderr)
        return _finished(federation, given.memory, observers)


def resume(
    folder: str | Path,
    model: object = None,
    data: object = None,
    *,
    rounds: int | None = None,
    observe: Observer = lambda line, totals: None,
    callbacks: Sequence[Observer] = (),
) -> FinishedRun:
    """Go on with a run that was stopped, or make one longer; one that is done is only read.

    Args:
        folder: Its run folder.
        model: What the run was given as its model, if that was no name.
        data: What the run was given as its data, if that was no name.
        rounds: How many in all, if more than before.
        observe: As for `federate`.
        callbacks: As for `federate`.

    Raises:
        SizewiseError: It cannot go on; the folder is left as it was.
    """
    path = Path(folder)
    observers = _checked(observe, *callbacks)
    memory = _again(resuming.read(path), model, data)
    changes = () if rounds is None else (f"rounds={rounds}",)
    with (
        memory.known_as(resuming.read(path).model.name),
        session.resumed(path, memory.dataset, overrides=changes) as federation,
    ):
        return _finished(federation, memory, observers)


def _finished(federation: Federation, memory: Memory, observers: Sequence[Observer]) -> FinishedRun:
    return FinishedRun(federation.folder.path, federation.run(*observers), memory)


def _checked(*observers: Callable[..., Any]) -> Sequence[Observer]:
    """Return functions to call after each round; raise ConfigError if one is none."""
    for one in observers:
        if not callable(one):
            raise ConfigError(
                "callbacks are functions of a round's line of the history and the totals; "
                f"{one!r} came: write def callback(line, totals)"
            )
    return observers


def _again(config: Config, model: object, data: object) -> Memory:
    """Return what a run is given again; what it finds by a name, it must not be given."""
    given = None if model is None else understood_model(model)
    samples = None if data is None else _data_again(config, data)
    names = {"model": config.model.name, "data": config.data.name}
    for what, came in (("model", given), ("data", samples)):
        if isinstance(came, str) and came != names[what]:
            raise ConfigError(f"the run's {what} is {names[what]!r}, not {came!r}; leave it out")
    if isinstance(given, Given) and config.model.sha256 is None and given.name != names["model"]:
        raise ConfigError(
            f"the run finds its model by the name {names['model']!r}; leave model out"
        )
    if samples is not None and not isinstance(samples, str) and config.data.sha256 is None:
        raise ConfigError(f"the run finds its data by the name {names['data']!r}; leave data out")
    return Memory(
        None if isinstance(samples, str) else samples, given if isinstance(given, Given) else None
    )


def _data_again(config: Config, data: object) -> str | Dataset:
    """Return data that is read as it was when the run was started."""
    if isinstance(data, Dataset):
        return data
    reads = {k: v for k, v in plain(config.data).items() if k not in ("name", "sha256")}
    return understood_data(data, reads, config.model.weights)
