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

import argparse
import json
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

Result = dict[str, Any]


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


def run(settings: list[str], folder: Path) -> Result:
    """Return the result of one run; an interrupted one goes on where it stopped."""
    result = folder / "result.json"
    if not result.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        sizewise = [sys.executable, "-m", "sizewise.cli"]
        if (folder / "config.toml").exists():
            command = [*sizewise, "resume", str(folder), "--json"]
        else:
            sets = [part for setting in settings for part in ("--set", setting)]
            command = [*sizewise, "run", "--out", str(folder), "--json", *sets]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise SystemExit(f"{folder}: {done.stderr[-2000:]}")
    lines = (folder / "updates.jsonl").read_text().splitlines()
    steps = sum(json.loads(line).get("steps", 0) for line in lines)
    found: Result = json.loads(result.read_text())
    return {**found, "steps": steps, "run_dir": folder.name}


def table(rows: Mapping[str, list[Result]]) -> str:
    """Return a Markdown table: one line a row, means over the seeds and every seed's accuracy.

    Where several sizes are deployed, their worst and average accuracies are shown as well.
    """
    sized = any(len(result["sizes"]) > 1 for results in rows.values() for result in results)
    heads = ["accuracy %", "by seed", *(["worst / average"] if sized else []), "steps"]
    heads += ["sent MB", "TFLOP", "largest peak MB", "minutes"]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, results in rows.items():
        percent = [100 * result["accuracy"] for result in results]
        mean = {
            key: statistics.fmean(result[key] for result in results)
            for key in ("steps", "bytes_up", "bytes_down", "flops", "seconds")
        }
        peak = max(max(p or 0 for p in result["peak_bytes"].values()) for result in results)
        by_seed = " ".join(f"{value:.1f}" for value in percent)
        lines.append(
            f"| {name} | {statistics.fmean(percent):.1f} | {by_seed} "
            f"{f'| {_worst_and_average(results)} ' if sized else ''}| {mean['steps']:,.0f} "
            f"| {(mean['bytes_up'] + mean['bytes_down']) / 1e6:,.0f} | {mean['flops'] / 1e12:,.1f} "
            f"| {peak / 1e6:.2f} | {mean['seconds'] / 60:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _worst_and_average(results: list[Result]) -> str:
    """Return both, in percent, as means over the seeds."""
    sizes = [list(result["sizes"].values()) for result in results]
    worst = statistics.fmean(min(scores) for scores in sizes)
    average = statistics.fmean(statistics.fmean(scores) for scores in sizes)
    return f"{100 * worst:.1f} / {100 * average:.1f}"


def main() -> None:
    """Run what is missing, then write results and table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="rows to run; default: all")
    chosen = parser.parse_args()
    suite = tomllib.loads(chosen.suite.read_text(encoding="utf-8"))
    scale = suite["scale"][chosen.scale]
    seeds, special, wider = (scale.pop(key, {}) for key in ("seeds", "row", "column"))
    name = f"{chosen.suite.parent.name}-{chosen.suite.stem}-{chosen.scale}"
    known = suite.get("column", {"": {}})
    columns = scale.pop("columns", list(known))
    rows = {
        f"{row}, {column}" if column else row: (
            *(known[column], wider.get(column, {})),
            *(changes, special.get(row, {})),
        )
        for column in columns
        for row, changes in suite["row"].items()
    }
    rows = {n: changes for n, changes in rows.items() if not chosen.only or n in chosen.only}
    with ThreadPoolExecutor(chosen.jobs) as pool:
        # Seed by seed, so that a suite that is stopped early has whole columns.
        common = [*flat(suite["base"]), *flat(scale)]
        pending = {
            (row, seed): pool.submit(
                run,
                [*common, *chain(*map(flat, changes)), f"seed={seed}"],
                Path("runs/papers", name, f"{row}-{seed}".replace(" ", "_").replace("/", "_")),
            )
            for seed in seeds
            for row, changes in rows.items()
        }
        results = {row: [pending[row, seed].result() for seed in seeds] for row in rows}
    text = table(results)
    chosen.suite.with_suffix(f".{chosen.scale}.md").write_text(text)
    chosen.suite.with_suffix(f".{chosen.scale}.json").write_text(
        json.dumps(results, indent=1) + "\n"
    )
    print(text)


if __name__ == "__main__":
    main()
