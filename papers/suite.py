"""Run a table of a paper: the same task for several methods and seeds, two runs at a time.

    python papers/suite.py papers/slt/figure1.toml [--scale mini] [--jobs 2] [--only ROW ...]

A suite is a TOML file: `[base]` is a sizewise config, `[scale.NAME]` changes it for one scale,
`[row.NAME]` for one row of the table, `[scale.NAME.row.NAME]` for a row at one scale, in that
order; an empty table empties what was there. With `[column.NAME]`, such as data sets, there is a
row for each of both; a scale may name some of them as `columns`, and change one further in
`[scale.NAME.column.NAME]`. Every run is what `sizewise run --json` gives.
What is done is not run again. Results go to `NAME.SCALE.json` and a table to `NAME.SCALE.md` beside
the suite; the folders of the runs, with all their logs, stay under `runs/papers/`.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import common
from sizewise import config
from sizewise.report import comparison, execution, live, summary


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


def rows_of(suite: Mapping[str, Any], scale: str) -> tuple[dict[str, dict[str, Any]], list[int]]:
    """Return the config's tables of each row of a suite at a scale, and the seeds."""
    changes = dict(suite["scale"][scale])
    seeds, special, wider = (changes.pop(key, {}) for key in ("seeds", "row", "column"))
    known = suite.get("column", {"": {}})
    rows = {}
    for column in changes.pop("columns", list(known)):
        for row, own in suite["row"].items():
            layers = (known[column], wider.get(column, {}), own, special.get(row, {}))
            values = [*flat(suite["base"]), *flat(changes), *chain(*map(flat, layers))]
            rows[f"{row}, {column}" if column else row] = config.read(None, values)
    return rows, list(seeds)


def main() -> None:
    """Run what is missing, then write results and table."""
    parser = common.parser(__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="rows to run; default: all")
    chosen = parser.parse_args()
    runs = common.Runs(chosen.suite, chosen.scale)
    found, seeds = rows_of(runs.tables, chosen.scale)
    rows = {row: tables for row, tables in found.items() if not chosen.only or row in chosen.only}
    jobs = comparison.jobs(rows, seeds, runs.folder)
    with live.LiveTable(jobs) as shown:
        outcomes = execution.carry_out(jobs, chosen.jobs, shown.update)
    for outcome in outcomes:
        if outcome.result is None:
            raise SystemExit(f"{outcome.job.folder}: {outcome.error}")
    results: dict[str, list[dict[str, Any]]] = {row: [] for row in rows}
    for outcome in outcomes:
        result = {**(outcome.result or {}), "run_dir": outcome.job.folder.name}
        results[outcome.job.row].append(result)
    text = summary.markdown(comparison.summary_rows(outcomes))
    chosen.suite.with_suffix(f".{chosen.scale}.md").write_text(text)
    chosen.suite.with_suffix(f".{chosen.scale}.json").write_text(
        json.dumps(results, indent=1) + "\n"
    )
    print(text)


if __name__ == "__main__":
    main()
