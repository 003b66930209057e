"""Run a table of a paper: the same task for several methods and seeds, two runs at a time.

    python papers/suite.py papers/slt/figure1.toml [--scale mini] [--jobs 2] [--only ROW ...]

A suite is a TOML file: `[base]` is a sizewise config, `[scale.NAME]` changes it for one scale,
`[row.NAME]` for one row of the table, `[scale.NAME.row.NAME]` for a row at one scale, in that
order; an empty table empties what was there. With `[column.NAME]`, such as data sets, there is a
row for each of both; a scale may change one further in `[scale.NAME.column.NAME]`. A scale may have
some `rows` and `columns` only, which it names. `[variant.NAME]` makes a second row of each of its
`rows`, with further changes. `[choose]` has values chosen for each row by validation
(`choosing.py`). Every run is what `sizewise run --json` gives.
What is done is not run again: results go to `NAME.SCALE.json` beside the suite after each run, and
are known there by their config (`results.py`), also to the other suites of the folder; a table goes
to `NAME.SCALE.md`. The folders of the runs, with all their logs, stay under `runs/papers/`. What
cannot be run says why in the table. With `--pack` nothing is run: what is under way is packed, to
go on elsewhere (`unfinished.py`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import common
from choosing import Choice
from results import Result, Results, found, identity
from sizewise import config
from sizewise.report import comparison, execution, live
from sizewise.report.comparison import Job, Outcome, folder_name
from unfinished import Unfinished

Tables = dict[str, Any]

REFUSED = (2, 3)
"""Exit codes of runs that cannot be made as the suite has them: that is a finding, and is kept.

Whatever else went wrong, such as a process that was killed, is tried again next time.
"""


def flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield nested tables as the `a.b=value` overrides of the command line."""
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={inline(value)}"


def inline(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


def with_variants(suite: Mapping[str, Any]) -> Iterator[tuple[str, str, Sequence[Tables]]]:
    """Yield the rows of a suite: name, the row that it is or varies, and its changes."""
    for row, own in suite["row"].items():
        yield row, row, (own,)
    for name, variant in suite.get("variant", {}).items():
        changes = {key: value for key, value in variant.items() if key != "rows"}
        for row in variant["rows"]:
            yield f"{row}, {name}", row, (suite["row"][row], changes)


def rows_of(suite: Mapping[str, Any], scale: str) -> tuple[dict[str, Tables], list[int]]:
    """Return the config's tables of each row of a suite at a scale, and the seeds."""
    changes = dict(suite["scale"][scale])
    seeds, special, wider = (changes.pop(key, {}) for key in ("seeds", "row", "column"))
    known = suite.get("column", {"": {}})
    every = {row: own for row, _, own in with_variants(suite)}
    chosen, rows = changes.pop("rows", list(every)), {}
    for column in changes.pop("columns", list(known)):
        for row in chosen:
            own = every[row]
            layers = (known[column], wider.get(column, {}), *own, special.get(row, {}))
            values = [*flat(suite["base"]), *flat(changes), *chain(*map(flat, layers))]
            rows[named(row, column)] = config.read(None, values)
    return rows, list(seeds)


def named(row: str, column: str) -> str:
    """Return what a row is called in a column."""
    return f"{row}, {column}" if column else row


class Suite:
    """A suite at a scale, and what was found of it."""

    def __init__(self, runs: common.Runs, jobs: int) -> None:
        self.runs, self.at_once = runs, jobs
        self.broken: list[str] = []
        self.tables = runs.tables
        self.rows, self.seeds = rows_of(self.tables, runs.scale)
        stem = runs.suite.with_suffix("")
        self.results = Results(Path(f"{stem}.{runs.scale}.json"))
        self.tried = Results(Path(f"{stem}.{runs.scale}.choice.json"))
        own = (self.results.path, self.tried.path)
        self.others = [
            Results(path) for path in sorted(runs.suite.parent.glob("*.json")) if path not in own
        ]
        self.unfinished = Unfinished(Path(f"{stem}.{runs.scale}.unfinished"))

    def find(self, tables: Tables, seed: int) -> Result | None:
        """Return the result of a run that is done, in this suite or another of its paper."""
        config = identity(tables, seed)
        places = (self.results, self.tried, *self.others)
        return next(filter(None, (place.find(config) for place in places)), None)

    def choose(self, wanted: Sequence[str]) -> None:
        """Try the values of rows, and put those that validate best into all of their columns."""
        choice = Choice.read(self.tables)
        if choice is None:
            return
        before = dict(self.rows)
        for row, like, _ in with_variants(self.tables):
            columns = self.tables.get("column", {"": {}})
            names = [name for column in columns if (name := named(row, column)) in wanted]
            if not names:
                continue
            grid, chooser = choice.grid(like), row if choice.variants else like
            tables = before[named(chooser, choice.column)]
            candidates = choice.candidates(chooser, grid, tables)
            self.carry_out(candidates, [choice.seed], self.tried)
            value = choice.best(grid, tables, self.find)
            for name in names:
                self.rows[name] = grid.assigned(self.rows[name], value)

    def carry_out(self, rows: Mapping[str, Tables], seeds: Sequence[int], into: Results) -> None:
        """Run what is missing of rows, and keep each result as it comes."""
        configs: dict[Path, str] = {}
        wanted: list[Job] = []
        for row, seed in product(rows, seeds):
            self.unfinished.unpack(self.runs.folder / folder_name(row, seed))
        for job in comparison.jobs(rows, seeds, self.runs.folder):
            if (known := self.find(rows[job.row], job.seed)) is not None:
                if known not in into.rows.get(job.row, ()):
                    into.put(job.row, {**known, "seed": job.seed})
                continue
            configs[job.folder] = identity(rows[job.row], job.seed)
            wanted.append(job)

        def keep(outcomes: Sequence[Outcome]) -> None:
            for outcome in outcomes:
                config = configs.pop(outcome.job.folder, None)
                if config is not None and outcome.exit_code in (0, *REFUSED):
                    into.put(outcome.job.row, found(outcome, config))
                    self.unfinished.drop(outcome.job.folder)
                elif config is not None:
                    self.broken.append(f"{outcome.job.folder}: {outcome.error}")

        with live.LiveTable(wanted) as shown:

            def watch(running: Sequence[Job], done: Sequence[Outcome]) -> None:
                shown.update(running, done)
                keep(done)

            # What is done already is only told in the end.
            keep(execution.carry_out(wanted, self.at_once, watch))


def main() -> None:
    """Run what is missing, and write the table."""
    parser = common.parser(__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="rows to run; default: all")
    parser.add_argument("--seeds", nargs="*", type=int, help="seeds to run; default: all")
    parser.add_argument("--pack", action="store_true", help="pack what is under way, run nothing")
    chosen = parser.parse_args()
    suite = Suite(common.Runs(chosen.suite, chosen.scale), chosen.jobs)
    if chosen.pack:
        print(*suite.unfinished.pack(suite.runs.folder), sep="\n")
        return
    names = [row for row in suite.rows if not chosen.only or row in chosen.only]
    suite.choose(names)
    rows = {row: suite.rows[row] for row in names}
    suite.carry_out(rows, chosen.seeds or suite.seeds, suite.results)
    text = suite.results.table(suite.rows)
    chosen.suite.with_suffix(f".{chosen.scale}.md").write_text(text, encoding="utf-8")
    print(text)
    if suite.broken:
        raise SystemExit("\n".join(suite.broken))


if __name__ == "__main__":
    main()
