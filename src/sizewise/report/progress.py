"""Progress on stderr: a line that follows the run; without a terminal, a line for each round."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from sizewise.common.structure import format_bytes
from sizewise.runs.folder import Totals


class Progress:
    """What a run has come to, round by round."""

    def __init__(self, rounds: int) -> None:
        console = Console(stderr=True)
        self._rounds = rounds
        self._bar = Bar(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("rounds", total=rounds, facts="starting")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, line: Mapping[str, Any], totals: Totals) -> None:
        """Show the state after a round."""
        facts = []
        if totals.accuracy is not None:
            facts.append(f"accuracy {totals.accuracy:.1%}")
        facts.append(f"sent {format_bytes(totals.bytes_up + totals.bytes_down)}")
        if totals.peak_bytes:
            facts.append(f"peak {format_bytes(max(totals.peak_bytes.values()))}")
        if "privacy" in line:
            facts.append(f"epsilon {max(line['privacy']['epsilon'].values()):.3g}")
        said = ", ".join(facts)
        if self._bar.disable:
            print(f"round {line['round']} of {self._rounds}: {said}", file=sys.stderr, flush=True)
        self._bar.update(self._task, completed=line["round"], facts=said)
