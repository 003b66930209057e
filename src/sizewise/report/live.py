"""The table of a comparison while it runs: one line a method, one column a seed."""

import sys
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sizewise.report.comparison import Job, Outcome
from sizewise.report.fitted import Column, fitted
from sizewise.report.records import lines


class LiveTable:
    """A table on stderr that follows the runs; without a terminal, a line for each that ends."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._told: set[str] = set()
        console = Console(stderr=True, highlight=False)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "LiveTable":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, running: Sequence[Job], done: Sequence[Outcome]) -> None:
        """Show how things stand."""
        if self._live is not None:
            self._live.update(self.table(running, done, self._live.console.width), refresh=True)
            return
        for outcome in done:
            name = str(outcome.job.folder)
            if name not in self._told:
                self._told.add(name)
                said = f"{outcome.job.row}, seed {outcome.job.seed}: {_ended(outcome)}"
                print(f"{said} ({len(done)} of {len(self._jobs)})", file=sys.stderr)

    def table(self, running: Sequence[Job], done: Sequence[Outcome], width: int) -> Group:
        """Return the table, in parts where a line has too few characters for all seeds."""
        cells = {job.folder: Text("waiting", "dim") for job in self._jobs}
        cells |= {job.folder: _under_way(job) for job in running}
        cells |= {outcome.job.folder: Text(_ended(outcome)) for outcome in done}
        rows = list(dict.fromkeys(job.row for job in self._jobs))
        seeds: dict[int, list[Text]] = {}
        for row in rows:
            for job in (job for job in self._jobs if job.row == row):
                seeds.setdefault(job.seed, []).append(cells[job.folder])
        columns = [
            Column(f"seed {seed}", each, right=False, wraps=True) for seed, each in seeds.items()
        ]
        first = [Column("", rows, right=False)]
        caption = f"{len(done)} of {len(cells)} done"
        return Group(*fitted(width, first, columns, caption=caption))


def _ended(outcome: Outcome) -> str:
    if outcome.result is None:
        return f"failed: {outcome.error}" if outcome.exit_code != 3 else "nothing was trained"
    sizes = outcome.result["sizes"]
    best = f" (best {max(sizes.values()):.1%})" if len(sizes) > 1 else ""
    return f"{outcome.result['accuracy']:.1%}{best} in {outcome.result['seconds']:.0f} s"


def _under_way(job: Job) -> Text:
    history = list(lines(job.folder / "history.jsonl"))
    if not history:
        return Text("starting")
    scores = [line["accuracy"] for line in history if "accuracy" in line]
    rounds = (f"round {history[-1]['round']} of {job.config.rounds}", "dim")
    return Text.assemble(f"{scores[-1]:.1%}  " if scores else "", rounds)
