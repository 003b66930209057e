"""The table of a comparison while it runs: one line a method, one column a seed."""

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from sizewise.report.comparison import Job, Outcome
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
            self._live.update(self.table(running, done), refresh=True)
            return
        for outcome in done:
            name = str(outcome.job.folder)
            if name not in self._told:
                self._told.add(name)
                said = f"{outcome.job.row}, seed {outcome.job.seed}: {_ended(outcome)}"
                print(f"{said} ({len(done)} of {len(self._jobs)})", file=sys.stderr)

    def table(self, running: Sequence[Job], done: Sequence[Outcome]) -> Table:
        """Return the table."""
        cells = {job.folder: "[dim]waiting[/]" for job in self._jobs}
        cells |= {job.folder: _under_way(job) for job in running}
        cells |= {outcome.job.folder: escape(_ended(outcome)) for outcome in done}
        seeds = list(dict.fromkeys(job.seed for job in self._jobs))
        table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=f"{len(done)} of {len(cells)} done")
        table.add_column("")
        for seed in seeds:
            table.add_column(f"seed {seed}", min_width=18)
        for row in dict.fromkeys(job.row for job in self._jobs):
            table.add_row(row, *(cells[job.folder] for job in self._jobs if job.row == row))
        return table


def _ended(outcome: Outcome) -> str:
    if outcome.result is None:
        return f"failed: {outcome.error}" if outcome.exit_code != 3 else "nothing was trained"
    sizes = outcome.result["sizes"]
    best = f" (best {max(sizes.values()):.1%})" if len(sizes) > 1 else ""
    return f"{outcome.result['accuracy']:.1%}{best} in {outcome.result['seconds']:.0f} s"


def _under_way(job: Job) -> str:
    history = list(lines(job.folder / "history.jsonl"))
    if not history:
        return "starting"
    scores = [line["accuracy"] for line in history if "accuracy" in line]
    score = f"{scores[-1]:.1%}  " if scores else ""
    return f"{score}[dim]round {history[-1]['round']} of {job.config.rounds}[/]"
