"""What a report knows: run folders, read as they are, without torch and without the data."""

import json
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from sizewise.errors import CheckpointError, NothingToShow
from sizewise.runs import cuts
from sizewise.runs.cuts import Cuts

COMPARISON = "comparison.json"
"""The file that makes a folder a comparison."""

COSTS = {
    "round": "rounds",
    "sent": "bytes sent, both ways",
    "flops": "FLOPs on devices",
    "seconds": "wall time",
    "device_seconds": "simulated device time",
}
"""What accuracy is shown against."""


@dataclass(frozen=True)
class Point:
    """What was measured, and what had been spent by then, by the keys of `COSTS`."""

    value: float
    costs: dict[str, float]


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        row: The line of a comparison that it belongs to, most often its method.
        seed: Its seed.
        folder: Where it is.
        config: The tables of its config.
        history: One entry a round.
        updates: One entry a device and round.
        plan: One entry a device class; empty in folders of earlier versions.
        partition: Who holds how many samples of each class.
        environment: Versions and machine.
        result: What `--json` printed; empty while the run is not done.
        cuts: How much of the model shrinks with the width; None if the method cuts nothing.
        served: What each device gets, where devices validate; see `runs.benefit`.
    """

    row: str
    seed: int
    folder: Path
    config: dict[str, Any]
    history: list[dict[str, Any]]
    updates: list[dict[str, Any]]
    plan: list[dict[str, Any]]
    partition: dict[str, Any]
    environment: dict[str, str]
    result: dict[str, Any]
    cuts: Cuts | None = None
    served: Sequence[dict[str, Any]] = ()

    @property
    def metric(self) -> str:
        """What its scores are: accuracy, or what its data is measured by."""
        found: str = self.result.get("metric") or self.config["data"].get("metric") or "accuracy"
        return found

    @cached_property
    def points(self) -> list[Point]:
        """The scores of the evaluations, in order."""
        return self.measured("accuracy")

    def measured(self, key: str) -> list[Point]:
        """Return one of the figures of the history, in order, from the rounds that have it."""
        spent: dict[str, list[float]] = {"round": [line["round"] for line in self.history]}
        for cost in ("flops", "seconds", "device_seconds"):
            if any(cost in line for line in self.history):
                spent[cost] = list(accumulate(line.get(cost, 0.0) for line in self.history))
        sent = (line["bytes_up"] + line["bytes_down"] for line in self.history)
        spent["sent"] = list(accumulate(sent))
        return [
            Point(line[key], {cost: values[place] for cost, values in spent.items()})
            for place, line in enumerate(self.history)
            if line.get(key) is not None
        ]

    def totals(self) -> dict[str, Any]:
        """Return what the run came to, with the keys of its result; also before its end."""
        merged = [line for line in self.updates if line["refused"] is None]
        peaks: dict[str, int] = {}
        for line in merged:
            peaks[line["group"]] = max(peaks.get(line["group"], 0), line["peak_bytes"] or 0)
        refused = len(self.updates) - len(merged)
        sums = {
            key: sum(line[key] for line in self.history)
            for key in ("bytes_up", "bytes_down", "flops", "seconds")
        }
        return {
            "accuracy": self.points[-1].value,
            "sizes": self.sizes,
            "steps": sum(line["steps"] for line in merged),
            "peak_bytes": peaks,
            "refused": [{"times": refused}] if refused else [],
            "validation": self.validation,
            **sums,
        }

    @property
    def error(self) -> str:
        """Why nothing was learned, if so."""
        return str(self.result.get("error") or "")

    @property
    def sizes(self) -> dict[str, float]:
        """The accuracy of each deployed size at the last evaluation."""
        return self._last("sizes")

    @property
    def validation(self) -> dict[str, Any]:
        """What devices got at the last evaluation; empty if they have no samples for that."""
        return self._last("validation")

    def _last(self, key: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = [line[key] for line in self.history if key in line]
        return found[-1] if found else {}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; one that is being written may lack its end."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def read(paths: Sequence[Path]) -> list[Run]:
    """Return the runs of some run folders and comparisons, in order.

    Raises:
        CheckpointError: A path is neither, or no round of it is done.
    """
    runs = [run for path in paths for run in _read(path)]
    # Runs of one method and seed differ in something else: their folders tell them apart.
    keys = [(run.row, run.seed) for run in runs]
    return [
        replace(run, row=run.folder.name) if keys.count((run.row, run.seed)) > 1 else run
        for run in runs
    ]


def _read(path: Path) -> Iterator[Run]:
    if (path / COMPARISON).is_file():
        found = json.loads((path / COMPARISON).read_text(encoding="utf-8"))["runs"]
        done = [entry for entry in found if entry["result"] is not None]
        if not done:
            raise CheckpointError(f"no run of the comparison {str(path)!r} got to its end")
        for entry in done:
            yield _read_run(path / entry["folder"], entry["row"])
    elif inside := under_way(path):
        begun = [run for folder in inside if (run := _begun(folder)) is not None]
        if not begun:
            raise NothingToShow(f"no run of the comparison {str(path)!r} has been evaluated yet")
        yield from begun
    else:
        yield _read_run(path, None)


def under_way(path: Path) -> list[Path]:
    """Return the run folders of a comparison that is not done; none if it is something else."""
    if (path / COMPARISON).is_file() or (path / "config.toml").is_file() or not path.is_dir():
        return []
    # Runs of a comparison are named by their row and seed; those of a user, by date and data.
    named = (one for one in path.iterdir() if one.name.rpartition("-")[2].isdecimal())
    return sorted(one for one in named if (one / "config.toml").is_file())


def _begun(folder: Path) -> Run | None:
    """Return a run of a comparison; None before its first evaluation."""
    try:
        return _read_run(folder, folder.name.rpartition("-")[0])
    except NothingToShow:
        return None


def _read_run(path: Path, row: str | None) -> Run:
    if not (path / "config.toml").is_file():
        raise CheckpointError(
            f"{str(path)!r} is neither a run folder nor a comparison; give a folder that "
            f"`sizewise run` or `sizewise compare` printed"
        )
    config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    history = list(lines(path / "history.jsonl"))
    if not any("accuracy" in line for line in history):
        raise NothingToShow(
            f"no round of {str(path)!r} has been evaluated yet; "
            f"go on with `sizewise resume {shlex.quote(str(path))}`"
        )
    return Run(
        row or config["method"]["name"],
        config["seed"],
        path,
        config,
        history,
        # A round that is not in the history has not been made durable.
        [line for line in lines(path / "updates.jsonl") if line["round"] <= history[-1]["round"]],
        _json(path / "plan.json", []),
        _json(path / "partition.json", {}),
        _json(path / "environment.json", {}),
        _json(path / "result.json", {}),
        cuts.read(path),
        _json(path / "devices.json", []),
    )


def _json(path: Path, otherwise: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else otherwise


def failures(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the rows of comparisons of which no run got to its end, each with its reason."""
    found: dict[str, str] = {}
    for path in paths:
        if (path / COMPARISON).is_file():
            runs = json.loads((path / COMPARISON).read_text(encoding="utf-8"))["runs"]
            done = {entry["row"] for entry in runs if entry["result"] is not None}
            found |= {entry["row"]: entry["error"] for entry in runs if entry["row"] not in done}
    return list(found.items())


def by_row(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each row, in the order in which rows first appear."""
    rows: dict[str, list[Run]] = {}
    for run in runs:
        rows.setdefault(run.row, []).append(run)
    return rows
