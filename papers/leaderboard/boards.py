"""The boards, from what the suites of this folder have found so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from shared import HERE, choosing, common, fidelity, results, suite
from sizewise import config, methods
from sizewise.families.base import Method
from sizewise.fleet.devices import Fleet
from sizewise.fleet.making import make_fleet
from sizewise.runs.leaderboard import Board, Shape, Standing

TASKS = ("cifar10", "femnist", "sst2")
SCALE = "mini"
FLEETS = {
    "weak": "all weak",
    "even": "even",
    "tenth": "one strong in ten",
}
"""The columns of the suites, and what they are called."""


@dataclass(frozen=True)
class Task:
    """A suite of the leaderboard, and what was found of it."""

    name: str
    folder: Path = HERE

    @cached_property
    def runs(self) -> common.Runs:
        """The suite at the scale of the leaderboard."""
        return common.Runs(self.folder / f"{self.name}.toml", SCALE)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The suite's file."""
        return self.runs.tables

    @cached_property
    def found(self) -> dict[str, list[results.Result]]:
        """The results of all rows."""
        return results.Results(self.folder / f"{self.name}.{SCALE}.json").rows

    @cached_property
    def tried(self) -> dict[str, list[results.Result]]:
        """The results of all values that were tried."""
        return results.Results(self.folder / f"{self.name}.{SCALE}.choice.json").rows

    @cached_property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The config's tables of all rows."""
        return suite.rows_of(self.tables, SCALE)[0]

    @cached_property
    def seeds(self) -> int:
        """How many seeds there shall be."""
        return len(suite.rows_of(self.tables, SCALE)[1])

    def fleet(self, column: str) -> Fleet:
        """Return the devices of a column."""
        tables = next(t for name, t in self.rows.items() if name.endswith(f", {column}"))
        return make_fleet(config.from_dict(tables).fleet, lambda ratio: 0)

    def shape(self, column: str) -> Shape:
        """Return what the devices of a column hold of the whole model."""
        fleet, whole = self.fleet(column), self.tables["about"]["whole"]
        return Shape(
            tuple((round((g.memory or 0) / whole, 4), g.count / fleet.total) for g in fleet.groups),
            round(self.tables["about"]["least"] / whole, 4),
        )

    def standings(self, board: Board) -> dict[str, Standing]:
        """Return the rows of a board that may be advised, and those that are trained as one."""
        found = {row.name: row for row in board.fair}
        same: dict[str, str] = self.tables.get("same", {})
        return found | {name: found[row] for name, row in same.items() if row in found}

    def names(self) -> list[str]:
        """Return the rows in the order of the suite, without their columns."""
        return [row for row, _, _ in suite.with_variants(self.tables)]

    def refusals(self, column: str) -> dict[str, str]:
        """Return the rows that cannot be run on a fleet, and why."""
        return {
            name: runs[0]["error"]
            for name in self.names()
            if (runs := self.found.get(f"{name}, {column}")) and not results.successes(runs)
        }

    def missing(self, column: str) -> int:
        """Return how many runs of a column are still to be made."""
        return sum(
            self.seeds - len(self.found.get(f"{name}, {column}", ())) for name in self.names()
        )

    def board(self, column: str) -> Board | None:
        """Return what was reached on a fleet; None while some row has not been tried there."""
        if not all(self.found.get(f"{name}, {column}") for name in self.names()):
            return None
        found = {
            name: runs
            for name in self.names()
            if (runs := results.successes(self.found.get(f"{name}, {column}", ())))
        }
        # While some rows have further seeds, all are compared by those that every row has.
        seeds = min(map(len, found.values()))
        rows = [self._standing(name, column, runs[:seeds]) for name, runs in found.items()]
        about = self.tables["about"]
        return Board(
            self.name,
            about["title"],
            column,
            FLEETS[column],
            about["text"],
            self.shape(column),
            tuple(sorted(rows, key=lambda row: -row.accuracy)),
            interval([row.by_seed for row in rows]),
        )

    def _standing(self, name: str, column: str, runs: Sequence[results.Result]) -> Standing:
        chosen = config.from_dict(self.rows[f"{name}, {column}"])
        asked = chosen.fleet.per_round * chosen.rounds
        refused = fmean(sum(r["times"] for r in run["refused"]) for run in runs)
        worst = [served for run in runs if (served := _worst_class(run)) is not None]
        return Standing(
            name,
            chosen.method.name,
            chosen.recipe.levers[0],
            round(fmean(run["accuracy"] for run in runs), 5),
            round(fmean(worst), 5) if worst else None,
            round(1 - refused / asked, 4),
            round(fmean(run["bytes_up"] + run["bytes_down"] for run in runs)),
            round(fmean(run["flops"] for run in runs)),
            max(peak or 0 for run in runs for peak in run["peak_bytes"].values()),
            round(fmean(run["device_seconds"] for run in runs), 2),
            tuple(round(run["accuracy"], 5) for run in runs),
            note(methods.find(chosen.method.name)),
            self._settings(name),
        )

    def _settings(self, name: str) -> tuple[str, ...]:
        """Return what a row has of its own in its recipe: what it says, and the chosen rate."""
        row = name.partition(",")[0]
        own = self.tables["row"][row].get("recipe", {})
        rate = self.rate(name) or self.rate(row)
        chosen = [f"{rate[0]}={rate[1]:g}"] if rate else []
        return (*(f"recipe.{key}={value}" for key, value in own.items()), *chosen)

    def rate(self, row: str) -> tuple[str, float] | None:
        """Return the key and the value that was chosen for a row; None if that is not done."""
        choice = choosing.Choice.read(self.tables)
        if choice is None:
            return None
        grid = choice.grid(row.partition(",")[0])
        tried = {
            value: self.tried.get(f"{row}, {choice.column}, {grid.key} {value:g}")
            for value in grid.values
        }
        scores = {
            value: runs[0]["validation"]["score"]
            for value, runs in tried.items()
            if runs and results.successes(runs)
        }
        if len(scores) < len(grid.values):
            return None
        return grid.key, max(scores, key=lambda value: scores[value])

    @property
    def hours(self) -> float:
        """What all runs took, in hours of one core that was shared with others."""
        known: dict[str, float] = {
            run["config"]: run.get("seconds", 0.0)
            for rows in (self.found, self.tried)
            for runs in rows.values()
            for run in runs
        }
        return sum(known.values()) / 3600


def note(method: type[Method]) -> str:
    """Return why a method is not to be advised, whatever it reached."""
    if method.Options().ignores_budgets:
        return "looks at no budget"
    beyond = sorted(method.discloses - {"weights"})
    return f"devices send {' and '.join(beyond)} of single samples" if beyond else ""


def _worst_class(run: Mapping[str, Any]) -> float | None:
    """Return the mean accuracy of the class of devices that a run serves worst."""
    classes = (run.get("validation") or {}).get("classes", {})
    return min((figures["mean"] for figures in classes.values()), default=None)


def interval(by_row: Sequence[Sequence[float]]) -> float | None:
    """Return half of the 95 % interval of a difference of two rows' means; None of one seed."""
    half = fidelity.half_interval(by_row)
    return None if math.isinf(half) else round(half, 5)
