"""What a run would do, from Python: nothing is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sizewise.api.arguments import Budgets, gather
from sizewise.report import figures, tables
from sizewise.runs import preview
from sizewise.runs.cuts import Cuts

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Preview:
    """What each device class would train, and what that costs. It prints as `sizewise plan` does.

    Attributes:
        rows: One for each device class, as `sizewise plan --json` prints them.
        cuts: How much of the model shrinks with the width; None if the method cuts nothing.
    """

    rows: tuple[Mapping[str, Any], ...]
    cuts: Cuts | None = None

    def frame(self) -> "pandas.DataFrame":
        """Return the rows as a DataFrame, without what is a table in itself."""
        import pandas

        flat = (str, int, float, type(None))
        rows = [{k: v for k, v in row.items() if isinstance(v, flat)} for row in self.rows]
        return pandas.DataFrame(rows)

    def figure(self, out: str | Path) -> Path:
        """Draw each class's bytes against its budget, as SVG, PDF or PNG; return where."""
        figures.draw_plan(self.rows, Path(out))
        return Path(out)

    def __repr__(self) -> str:
        """Return the table."""
        return tables.text(partial(tables.show_plan, self.rows, self.cuts))


def plan(
    model: object,
    data: object = "digits",
    *,
    budgets: Budgets = None,
    method: str = "fedavg",
    rounds: int = 20,
    **tables: Any,
) -> Preview:
    """Return what `federate` would do with the same arguments; nothing is trained or written.

    Args:
        model: As for `federate`.
        data: As for `federate`.
        budgets: As for `federate`.
        method: See `sizewise list methods`.
        rounds: How many.
        **tables: As for `federate`.

    Raises:
        SizewiseError: Something cannot be used as it stands.
    """
    given = gather("plan", model, data, budgets, rounds, tables)
    config = given.config(method, tables.get("method_options", {}))
    with given.memory.known_as(given.name):
        rows, cuts = preview.rows_and_cuts(config, given.memory.dataset)
    return Preview(tuple(rows), cuts)
