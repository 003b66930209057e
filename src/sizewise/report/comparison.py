"""A comparison: one task, a row for each method and each varied value, several seeds.

Each run is what `sizewise run` gives, in a folder of its own: what is done is not run again, and
what was stopped goes on where it was. All runs of a seed have the same split, the same budgets and
the same sampled devices, because these depend on the config and the seed alone.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sizewise import config as configs
from sizewise.common.structure import plain
from sizewise.config import Config, EngineConfig
from sizewise.data.catalog import own_name
from sizewise.errors import ConfigError, NothingMerged
from sizewise.exchange.checkpoint import write_bytes
from sizewise.report import summary
from sizewise.report.records import COMPARISON, lines
from sizewise.report.summary import Row, summarise
from sizewise.report.sweep import values

Tables = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """One run of a comparison, on one core: the number of workers does not change its bits.

    Its row is most often its method's name.
    """

    row: str
    seed: int
    config: Config
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    The result is what `sizewise run --json` printed, and the optimiser steps of all devices; None
    if the run failed. The error then says why, in one sentence.
    """

    job: Job
    result: Mapping[str, Any] | None
    error: str = ""
    exit_code: int = 0


def by_method(tables: Tables, names: Sequence[str]) -> dict[str, Tables]:
    """Return a config's tables for each method; its options stay with the method they belong to."""
    given = tables.get("method", {})
    own = given.get("name") if isinstance(given, Mapping) else None
    return {name: tables if name == own else {**tables, "method": {"name": name}} for name in names}


def jobs(rows: Mapping[str, Tables], seeds: Sequence[int], folder: Path) -> list[Job]:
    """Return the runs of a comparison, seed by seed: one that is stopped early has whole columns.

    Raises:
        ConfigError: A config is bad, or a run in the folder was made with another one.
    """
    made = []
    for seed in seeds:
        for row, tables in rows.items():
            chosen = configs.from_dict({**tables, "seed": seed, "engine": _one_core(tables)})
            made.append(Job(row, seed, chosen, folder / folder_name(row, seed)))
    for job in made:
        if (job.folder / "config.toml").exists():
            earlier, usual = configs.load(job.folder / "config.toml"), EngineConfig()
            if replace(earlier, engine=usual) != replace(job.config, engine=usual):
                raise ConfigError(
                    f"{str(job.folder)!r} holds a run with another config; "
                    f"choose another --out, or delete it"
                )
    rows_of = {job.folder: job.row for job in made}
    if (twin := next((job for job in made if rows_of[job.folder] != job.row), None)) is not None:
        raise ConfigError(
            f"{twin.row!r} and {rows_of[twin.folder]!r} would share the folder "
            f"{twin.folder.name!r}; compare them in two commands, with another --out"
        )
    return made


def folder_name(row: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return re.sub(r"[ /:'\"{}\[\]]", "_", f"{row}-{seed}")


def _one_core(tables: Tables) -> Any:
    engine = tables.get("engine", {})
    return {**engine, "workers": 1} if isinstance(engine, Mapping) else engine


def default_folder(tables: Tables, data: str) -> Path:
    """Return where a comparison lives by default: the same task goes on in the same folder."""
    return Path("runs") / f"compare-{Path(own_name(data)).name}-{identity(tables)}"


def identity(tables: Tables) -> str:
    """Return a short name of a task: the same for all methods, seeds and numbers of workers."""
    task = {k: v for k, v in tables.items() if k not in ("method", "seed", "engine")}
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:8]


def finished(job: Job) -> Outcome | None:
    """Return the outcome of a job whose result is on disk."""
    path = job.folder / "result.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    if result.get("error"):
        return Outcome(job, None, result["error"], NothingMerged.exit_code)
    steps = sum(line.get("steps", 0) for line in lines(job.folder / "updates.jsonl"))
    return Outcome(job, {**result, "steps": steps})


def summary_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the rows of the table, in the order in which they were asked for."""
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.job.row, []).append(outcome)
    return [
        summarise(
            name,
            {one.job.seed: one.result for one in some if one.result is not None},
            next((one.error for one in some if one.error), ""),
        )
        for name, some in rows.items()
    ]


def save(folder: Path, outcomes: Sequence[Outcome], varied: Sequence[str] = ()) -> dict[str, Any]:
    """Write the tables of a comparison and what it consists of; return the latter.

    Args:
        folder: Where.
        outcomes: Its runs.
        varied: Dotted keys of the config in which rows differ: each run is saved with its values.
    """
    rows = summary_rows(outcomes)
    seeds = list(dict.fromkeys(outcome.job.seed for outcome in outcomes))
    found = {
        "seeds": seeds,
        "rows": [
            {**plain(row), "mean": row.mean, "spread": row.spread} if row.accuracy else plain(row)
            for row in rows
        ],
        "runs": [
            {
                "row": outcome.job.row,
                "seed": outcome.job.seed,
                "folder": outcome.job.folder.name,
                **({"varied": values(outcome.job.config, varied)} if varied else {}),
                "error": outcome.error,
                "result": outcome.result,
            }
            for outcome in outcomes
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "table.md": summary.markdown(rows),
        "table.csv": summary.comma_separated(rows, seeds),
        "table.tex": summary.latex(rows),
        COMPARISON: json.dumps(found, indent=1) + "\n",
    }.items():
        write_bytes(folder / name, text.encode())
    return found
