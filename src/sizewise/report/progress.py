"""Progress on stderr: a line that follows the run; without a terminal, lines in a log."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from sizewise.common.structure import format_bytes
from sizewise.runs.folder import Totals

SECONDS = 2.0
"""Of rounds that are shorter, a log has no line each: one after so many seconds, and the last."""


class Progress:
    """What a run has come to, round by round.

    Args:
        rounds: How many there will be.
        seconds: Least time between two lines where there is no terminal.
    """

    def __init__(self, rounds: int, seconds: float = SECONDS) -> None:
        console = Console(stderr=True)
        self._rounds, self._seconds = rounds, seconds
        self._told = -math.inf
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
        number, now = line["round"], time.monotonic()
        if self._bar.disable and (number >= self._rounds or now >= self._told + self._seconds):
            self._told = now
            print(f"round {number} of {self._rounds}: {said}", file=sys.stderr, flush=True)
        self._bar.update(self._task, completed=number, facts=said)
