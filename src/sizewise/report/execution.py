"""Carrying out the runs of a comparison: in processes of their own, or one after another in this.

What is done is not run again, and what was stopped goes on where it was. The bits are the same.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import LogRecord
from typing import IO

import tomli_w

from sizewise.data.dataset import Dataset
from sizewise.errors import SizewiseError
from sizewise.report.comparison import Job, Outcome, finished
from sizewise.runs import session

Watch = Callable[[Sequence[Job], Sequence[Outcome]], None]
"""Called again and again with the jobs that are running and with what is done."""


def carry_out(
    wanted: Sequence[Job], at_once: int, watch: Watch = lambda running, done: None
) -> list[Outcome]:
    """Run what is missing, some jobs at a time, and return all outcomes in the order of the jobs.

    Each job takes one core; `watch` is told twice a second how things stand.

    Raises:
        KeyboardInterrupt: After every run under way was stopped in an orderly manner.
    """
    outcomes = {job.folder: found for job in wanted if (found := finished(job)) is not None}
    waiting = [job for job in wanted if job.folder not in outcomes]
    running: list[_Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Run(waiting.pop(0)))
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                outcomes[run.job.folder] = run.outcome()
            watch([run.job for run in running], list(outcomes.values()))
            time.sleep(0.5)
    finally:
        for run in running:
            run.process.send_signal(signal.SIGINT)
        for run in running:
            run.process.wait()
            run.outcome()
    return [outcomes[job.folder] for job in wanted]


class _Run:
    """A job in a process of its own."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed when read)
        command = [sys.executable, "-P", "-m", "sizewise"]
        if (job.folder / "config.toml").exists():
            command += ["resume", str(job.folder)]
        else:
            job.folder.parent.mkdir(parents=True, exist_ok=True)
            command += ["run", "-", "--out", str(job.folder)]
        self.process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            text=True,
            # A group of its own: Ctrl-C reaches this process only, which then stops its runs.
            process_group=0,
        )
        if self.process.stdin is not None:
            self.process.stdin.write(tomli_w.dumps(job.config.to_dict()))
            self.process.stdin.close()

    def outcome(self) -> Outcome:
        """Return what became of it, once it has ended."""
        with self._errors:
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines() or ["it ended without a word"]
        found = finished(self.job)
        if found is not None:
            return found
        reason = said[-1].removeprefix("error: ")
        return Outcome(self.job, None, reason, self.process.returncode)


def carry_out_here(
    wanted: Sequence[Job],
    dataset: Dataset | None = None,
    watch: Watch = lambda running, done: None,
) -> list[Outcome]:
    """Do the same in this process, run after run: another could not import a model in memory.

    Args:
        wanted: The jobs.
        dataset: Their data, if that is in memory.
        watch: Told after each round.
    """
    outcomes: list[Outcome] = []
    with _saying_things_once():
        for job in wanted:
            outcomes.append(finished(job) or _outcome_here(job, dataset, watch, outcomes))
            watch([], outcomes)
    return outcomes


@contextmanager
def _saying_things_once() -> Iterator[None]:
    """Keep sessions from repeating themselves: all runs have the same to say of their data."""
    said: set[str] = set()

    def is_new(record: LogRecord) -> bool:
        before = len(said)
        said.add(record.getMessage())
        return len(said) > before

    session.log.addFilter(is_new)
    try:
        yield
    finally:
        session.log.removeFilter(is_new)


def _outcome_here(
    job: Job, dataset: Dataset | None, watch: Watch, done: Sequence[Outcome]
) -> Outcome:
    error: SizewiseError | None = None
    if (job.folder / "config.toml").exists():
        opening = session.resumed(job.folder, dataset)
    else:
        opening = session.started(job.config, job.folder, dataset)
    try:
        with opening as federation:
            federation.run(lambda line, totals: watch([job], done))
    except SizewiseError as raised:
        error = raised
    # A run of which nothing was merged raises an error, and has a result.
    return finished(job) or Outcome(job, None, str(error), getattr(error, "exit_code", 1))
