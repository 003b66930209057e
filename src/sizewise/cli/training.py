"""A run from its first round to its result, and what happens when it is interrupted."""

import gc
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sizewise.cli.options import INTERRUPTED
from sizewise.common.heap import keep_freed
from sizewise.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sizewise.config import Config
    from sizewise.runs.federation import Federation
    from sizewise.runs.folder import Totals


def train(opening: "AbstractContextManager[Federation]", as_json: bool, track: list[str]) -> None:
    """Run a federation with a progress line, then print its result."""
    from sizewise.report import progress, tables
    from sizewise.runs import trackers

    names = trackers.checked(track)
    collect_garbage()
    keep_freed()
    with opening as federation, _interrupts() as came:
        tables.announce(federation)
        tables.announce_changes(federation)
        config, path = federation.config, federation.folder.path
        hint = f"go on with: sizewise resume {shlex.quote(str(path))}"
        try:
            with (
                progress.Progress(config.rounds) as bar,
                trackers.opened(names, config, path) as tell,
            ):

                def observe(line: Mapping[str, Any], totals: "Totals") -> None:
                    bar.update(line, totals)
                    tell(line, totals)
                    if came:
                        raise KeyboardInterrupt

                result: Mapping[str, Any] = federation.run(observe)
        except KeyboardInterrupt:
            print(f"interrupted; {hint}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            # The disk is full, or a folder went away: every finished round is still there.
            print(f"error: {error}; mend that, then {hint}", file=sys.stderr)
            raise typer.Exit(1) from None
    _show(result, as_json)


def simulate(config: "Config", out: Path | None, as_json: bool, track: list[str]) -> None:
    """Run a federation on simulated Flower nodes, then print its result."""
    from sizewise.flower import simulation as flower_simulation
    from sizewise.report import progress

    if track:
        raise ConfigError("--track works with --engine local only; leave it out")
    flower_simulation.check_installed()
    collect_garbage()
    with progress.Progress(config.rounds) as bar:
        result = flower_simulation.run(config, out, bar.update)
    _show(result, as_json)


def collect_garbage() -> None:
    """Begin to look for garbage, but not in what has been imported."""
    gc.freeze()
    gc.enable()


def _show(result: Mapping[str, Any], as_json: bool) -> None:
    from sizewise.report import tables

    if as_json:
        print(json.dumps(result))
    else:
        tables.show_result(result)
        hint = f"sizewise report {shlex.quote(result['run_dir'])}"
        print(f"look at it with: {hint}", file=sys.stderr)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Note interrupts beside raising them: Python drops one that comes in a finaliser."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
