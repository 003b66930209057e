"""Values that a suite chooses for each row before it runs it, such as learning rates.

    [choose]
    key = "recipe.lr"               # what is chosen
    values = [0.03, 0.1, 0.3]       # among which
    column = "even"                 # where, if the suite has columns
    seed = 0                        # with which seed

    [choose.row.fedadam]            # another key or other values for one row
    key = "recipe.server_lr"
    values = [0.001, 0.003, 0.01]

The value with the best validation score wins, the first of equals; the test set has no say. A
variant takes the value of its row or, with `variants = true`, chooses among the same ones. All that
was tried is kept in `NAME.SCALE.choice.json`.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from results import Result
from sizewise import config
from sizewise.common.structure import build

Tables = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """What is chosen for a row, and among which values."""

    key: str
    values: tuple[float, ...]

    def assigned(self, tables: Tables, value: float) -> Tables:
        """Return a config's tables with a value in its place."""
        changed = deepcopy(tables)
        config.put(changed, self.key, value, "choose.key")
        return changed


@dataclass(frozen=True)
class Choice:
    """The `[choose]` table of a suite."""

    key: str
    values: tuple[float, ...]
    column: str = ""
    seed: int = 0
    variants: bool = False
    row: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @staticmethod
    def read(suite: Mapping[str, Any]) -> "Choice | None":
        """Return what a suite chooses; None if it chooses nothing."""
        return build(Choice, suite["choose"], "choose") if "choose" in suite else None

    def grid(self, row: str) -> Grid:
        """Return what is chosen for a row."""
        own = self.row.get(row, {})
        return Grid(own.get("key", self.key), tuple(own.get("values", self.values)))

    def candidates(self, row: str, grid: Grid, tables: Tables) -> dict[str, Tables]:
        """Return a row with each of some values, by what the run is called."""
        where = f", {self.column}" if self.column else ""
        return {
            f"{row}{where}, {grid.key} {value:g}": grid.assigned(tables, value)
            for value in grid.values
        }

    def best(
        self, grid: Grid, tables: Tables, find: Callable[[Tables, int], Result | None]
    ) -> float:
        """Return the value of a row that validates best: the first if it cannot be run at all.

        Args:
            grid: The values.
            tables: The row's config's tables in the column in which is chosen.
            find: Returns the result of tables and a seed, all of which were tried.
        """
        scores = []
        for value in grid.values:
            result = find(grid.assigned(tables, value), self.seed) or {}
            scores.append((result.get("validation") or {}).get("score", -1.0))
        return grid.values[scores.index(max(scores))]
