"""What a run would do, and which method to run, from Python: nothing is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sizewise.api.arguments import Budgets, gather
from sizewise.errors import ConfigError
from sizewise.report import advice, figures, tables
from sizewise.report.advice import Advice
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


@dataclass(frozen=True, repr=False)
class Recommendation:
    """What every method would do on a fleet, and which to use. It prints as `sizewise advise` does.

    Attributes:
        advice: All that was found.
    """

    advice: Advice

    @property
    def method(self) -> str | None:
        """The method to use, for `federate`; None if none of the leaderboard can be used."""
        return None if (fit := self.advice.recommended) is None else fit.method

    @property
    def levers(self) -> str:
        """What `recipe.levers` should be then."""
        return "none" if (fit := self.advice.recommended) is None else fit.levers

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        return self.advice.reason()

    def frame(self) -> "pandas.DataFrame":
        """Return a row for each method that fits, the best of the leaderboard first."""
        import pandas

        whole = ("classes", "elsewhere")
        rows = self.advice.to_dict()["methods"]
        return pandas.DataFrame([{k: v for k, v in r.items() if k not in whole} for r in rows])

    def __repr__(self) -> str:
        """Return the table and the sentence."""
        return tables.text(partial(tables.show_advice, self.advice))


def advise(
    model: object,
    data: object = "digits",
    *,
    budgets: Budgets = None,
    rounds: int = 20,
    patience: float = advice.PATIENCE,
    **tables: Any,
) -> Recommendation:
    """Return what every method would do with a model on a fleet, and which to use.

    Args:
        model: As for `federate`.
        data: As for `federate`.
        budgets: As for `federate`.
        rounds: How many.
        patience: Seconds of the processor after which no further method is planned.
        **tables: As for `federate`.

    Raises:
        SizewiseError: Something cannot be used as it stands.
    """
    given = gather("advise", model, data, budgets, rounds, tables)
    if tables.get("method_options"):
        raise ConfigError("advise looks at every method, each with its defaults: no method_options")
    with given.memory.known_as(given.name):
        return Recommendation(advice.advise(given.tables, patience, given.memory.dataset))
