"""What suites have found, kept in one JSON file each and known again by the config of a run.

The file has a list of results for each row, a line each, in the order of the seeds. A result is
what `sizewise run --json` gives, and `seed`, `config` (a hash of what the suite asked for), `steps`
and `device_seconds`. A run that could not be made has an `error` in the place of numbers.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sizewise.report import summary
from sizewise.report.comparison import Job, Outcome
from sizewise.report.records import lines

Result = dict[str, Any]


def identity(tables: Mapping[str, Any], seed: int) -> str:
    """Return a short name of a run: the same wherever and by however many workers it is made.

    It looks at what a suite says, not at defaults: a key that is new in the library changes nothing
    of what was measured.
    """
    task = {**{key: value for key, value in tables.items() if key != "engine"}, "seed": seed}
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:12]


def found(outcome: Outcome, config: str) -> Result:
    """Return what is kept of a run."""
    job = outcome.job
    known: Result = {"seed": job.seed, "config": config}
    if outcome.result is None:
        return {**known, "error": outcome.error}
    result = kept({**outcome.result, **known, "run_dir": job.folder.name})
    if (seconds := _device_seconds(job)) is not None:
        result["device_seconds"] = seconds
    return result


def kept(result: Result) -> Result:
    """Return a result without what would make files large and nobody reads.

    That is what the best round was, and where hundreds of devices have models of their own, all of
    them but the best and the worst; `mean` has the mean of all.
    """
    sizes = result.get("sizes", {})
    if len(sizes) > MOST_SIZES:
        ends = (max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__))
        result = {**result, "sizes": {name: sizes[name] for name in ends}}
    return {key: value for key, value in result.items() if key != "best_round"}


MOST_SIZES = 100


def _device_seconds(job: Job) -> float | None:
    """Return the simulated time of a run; None if the devices' speed is not known."""
    rounds = [line.get("device_seconds") for line in lines(job.folder / "history.jsonl")]
    known = [seconds for seconds in rounds if seconds is not None]
    return sum(known) if known else None


def successes(runs: Iterable[Result]) -> list[Result]:
    """Return the runs of a row that were made."""
    return [run for run in runs if not run.get("error")]


class Results:
    """The results in a file.

    Attributes:
        path: The file; it need not exist.
        rows: Its results, by row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self._read()

    def find(self, config: str) -> Result | None:
        """Return the result of a config, in whatever row it is."""
        runs = (run for some in self.rows.values() for run in some)
        return next((run for run in runs if run.get("config") == config), None)

    def put(self, row: str, result: Result) -> None:
        """Keep a result in the place of that of the same seed, and write the file.

        The same suite may run in another shell: what that has found meanwhile stays.
        """
        self.rows = self._read()
        kept = [run for run in self.rows.get(row, ()) if run["seed"] != result["seed"]]
        self.rows[row] = sorted([*kept, result], key=lambda run: int(run["seed"]))
        # A line for each run: what a commit adds can be read.
        rows = [
            f"{json.dumps(row)}: [\n" + ",\n".join(map(json.dumps, runs)) + "\n]"
            for row, runs in self.rows.items()
        ]
        draft = self.path.with_name(f".{self.path.name}.tmp")
        draft.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
        draft.rename(self.path)

    def _read(self) -> dict[str, list[Result]]:
        if not self.path.exists():
            return {}
        # What earlier versions wrote has no seeds: they counted from 0.
        return {
            row: [kept({"seed": number, **run}) for number, run in enumerate(runs)]
            for row, runs in json.loads(self.path.read_text(encoding="utf-8")).items()
        }

    def table(self, rows: Iterable[str]) -> str:
        """Return rows as a table in Markdown; what could not be run says why."""
        return summary.markdown(
            [
                summary.summarise(
                    row,
                    {run["seed"]: run for run in successes(runs)},
                    next((run["error"] for run in runs if run.get("error")), ""),
                )
                for row in rows
                if (runs := self.rows.get(row))
            ]
        )
