"""Several methods under one protocol, from Python: what `sizewise compare` does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sizewise import config as configs
from sizewise.api.arguments import Arguments, Budgets, Memory, gather
from sizewise.api.running import FinishedRun
from sizewise.common.cores import CORES
from sizewise.common.structure import plain
from sizewise.data import memory as data_memory
from sizewise.errors import ConfigError, NothingMerged
from sizewise.report import comparison, execution, live, page, summary, sweep, tables
from sizewise.report.comparison import Outcome
from sizewise.report.summary import Row
from sizewise.runs import preparation

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs of several methods under one protocol. It prints as the table of `sizewise compare`.

    Attributes:
        folder: Where it is: run folders, `table.md`, `table.csv`, `table.tex`, `report.html`.
        outcomes: What became of each run, seed by seed.
        varied: The dotted keys of the config in which rows differ beside their method.
        memory: What the runs were given that is not in their folders.
    """

    folder: Path
    outcomes: tuple[Outcome, ...]
    varied: tuple[str, ...] = ()
    memory: Memory = field(default_factory=Memory)

    @property
    def rows(self) -> list[Row]:
        """The rows of the table: means over the seeds."""
        return comparison.summary_rows(self.outcomes)

    @property
    def runs(self) -> dict[tuple[str, int], FinishedRun]:
        """The runs that got to their end, by row and seed: `runs["heterofl", 0]`."""
        return {
            (one.job.row, one.job.seed): FinishedRun(one.job.folder, dict(one.result), self.memory)
            for one in self.outcomes
            if one.result is not None
        }

    @property
    def best(self) -> FinishedRun:
        """The best run of the row with the highest mean accuracy over its seeds."""
        row = max((row for row in self.rows if row.accuracy), key=lambda row: row.mean)
        runs = [run for (name, _), run in self.runs.items() if name == row.name]
        return max(runs, key=lambda run: run.accuracy)

    def frame(self, each_run: bool = False) -> "pandas.DataFrame":
        """Return the table as a DataFrame.

        Args:
            each_run: One line for each run, with its seed, its varied values and its result,
                instead of one for each row.
        """
        import pandas

        if not each_run:
            seeds = list(dict.fromkeys(one.job.seed for one in self.outcomes))
            return pandas.DataFrame(summary.figures(self.rows, seeds))
        return pandas.DataFrame(
            [
                {
                    "row": one.job.row,
                    "method": one.job.config.method.name,
                    "seed": one.job.seed,
                    **sweep.values(one.job.config, self.varied),
                    **(one.result or {}),
                    "error": one.error or None,
                }
                for one in self.outcomes
            ]
        )

    def report(self, out: str | Path = "report.html") -> Path:
        """Write its report, one HTML file, and return where."""
        return page.write([self.folder], Path(out))

    def __repr__(self) -> str:
        """Return the table, and why rows have no numbers."""
        return tables.text(partial(tables.show_comparison, self.rows, self.folder))

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        words = summary.meaning(self.rows)
        return summary.html(self.rows) + (f"<p>{escape(words)}</p>" if words else "")


def compare(
    model: object,
    data: object = "digits",
    *,
    methods: Sequence[str],
    seeds: Sequence[int] = (0,),
    vary: Mapping[str, Sequence[Any]] | None = None,
    budgets: Budgets = None,
    rounds: int = 20,
    out: str | Path | None = None,
    jobs: int = CORES,
    method_options: Mapping[str, Mapping[str, Any]] | None = None,
    **tables: Any,
) -> Comparison:
    """Run several methods on the same task; what is done already is not run again.

    Names of models and data go to processes of their own, some at a time. What is in memory cannot:
    such runs are carried out here, one after another, with the same results.

    Args:
        model: As for `federate`.
        data: As for `federate`.
        methods: See `sizewise list methods`.
        seeds: One run of each method for each of them.
        vary: Values to try, by their key in the config: `{"recipe.lr": [0.01, 0.1]}`. Of several
            keys, every combination is a row of its own.
        budgets: As for `federate`.
        rounds: How many.
        out: Folder of the comparison; default: one under `runs/` that is named after the task.
        jobs: Runs at a time.
        method_options: Options of methods, by their names: `{"heterofl": {"widths": [0.5, 1]}}`.
        **tables: As for `federate`, but for `seed`.

    Raises:
        SizewiseError: Something cannot be used as it stands, or no run got to its end.
    """
    given = gather("compare", model, data, budgets, rounds, {**tables})
    if "seed" in tables:
        raise ConfigError("compare takes seeds=[0, 1, 2], not seed")
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, not {jobs}")
    names, numbers, grid = _names(methods), _numbers(seeds), vary or {}
    if unknown := set(method_options or {}) - set(names):
        raise ConfigError(
            f"method_options are by the names in methods, and {sorted(unknown)[0]!r} is none"
        )
    with given.memory.known_as(given.name):
        given, rows = _rows(given, names, method_options or {}, grid)
        data_name = configs.from_dict(next(iter(rows.values()))).data.name
        folder = Path(out) if out else comparison.default_folder(given.tables, data_name)
        wanted = comparison.jobs(rows, numbers, folder)
        with live.LiveTable(wanted) as shown:
            if given.memory.empty:
                outcomes = execution.carry_out(wanted, jobs, shown.update)
            else:
                outcomes = execution.carry_out_here(wanted, given.memory.dataset, shown.update)
    comparison.save(folder, outcomes, list(grid))
    if not any(outcome.result for outcome in outcomes):
        first = outcomes[0]
        kind = NothingMerged if first.exit_code == NothingMerged.exit_code else ConfigError
        raise kind(f"no run of the comparison got to its end; {first.job.row}: {first.error}")
    page.write([folder], folder / "report.html")
    return Comparison(folder, tuple(outcomes), tuple(grid), given.memory)


def _names(methods: Sequence[str]) -> list[str]:
    names = [methods] if isinstance(methods, str) else list(methods)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f'methods are names such as ["fedavg", "heterofl"], not {methods!r}')
    return list(dict.fromkeys(names))


def _numbers(seeds: Sequence[int]) -> list[int]:
    numbers = [seeds] if isinstance(seeds, int) else list(seeds)
    if not numbers or not all(type(n) is int and n >= 0 for n in numbers):
        raise ConfigError(f"seeds are whole numbers such as [0, 1, 2], not {seeds!r}")
    return list(dict.fromkeys(numbers))


def _rows(
    given: Arguments,
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    grid: sweep.Grid,
) -> tuple[Arguments, dict[str, Mapping[str, Any]]]:
    """Return the tables of each row, with hashes of what is in memory; and the task with them.

    Without them, a comparison would take runs of another model of the same name for its own.
    """
    dataset, model = given.memory.dataset, given.memory.model
    if dataset is not None:
        table = configs.from_dict(given.tables).data
        data = plain(data_memory.recorded(table, dataset))
        given = replace(given, tables={**given.tables, "data": data})
    plain_rows = {name: given.with_method(name, options.get(name, {})) for name in names}
    rows = sweep.rows(plain_rows, grid)
    if model is None:
        return given, rows
    for row, content in rows.items():
        config = configs.from_dict(content)
        known = preparation.identified(config, dataset or preparation.loaded(config))
        rows[row] = {**content, "model": {**content["model"], "sha256": known.model.sha256}}
    first = next(iter(rows.values()))
    return replace(given, tables={**given.tables, "model": first["model"]}), rows
