"""The run folder: everything a run leaves on disk, in the order in which it becomes durable.

    config.toml            the complete config; config.record.json: as the run has it
    plan.json              what each device class trains; environment.json: versions, machine
    cuts.json              how much of the model shrinks with the width, if the method cuts it
    partition.safetensors  which device holds which samples; partition.json says it for people
    updates.jsonl          one line for each device and round
    history.jsonl          one line for each round
    devices.json           what each device gets, where devices have samples to validate on
    checkpoints/           the last two rounds, and the best; devices/ holds what devices remember
    final.safetensors      the server's tensors after the last round; best.safetensors: at its best
    result.json            what `--json` prints

A round is durable once its checkpoint has its name. The checkpoint knows how long the two logs were
then, so lines of a round that never finished are cut off on resume. Logs and checkpoints are
written while the next round is under way, at most one round behind: waiting for a disk can take
longer than a round of a small model.
"""

import fcntl
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sizewise.common.structure import build, plain
from sizewise.config import Config
from sizewise.errors import CheckpointError, ConfigError
from sizewise.exchange import checkpoint
from sizewise.exchange.checkpoint import DeviceFiles
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.runs import resuming
from sizewise.runs.benefit import Benefit
from sizewise.runs.resuming import Change


@dataclass(frozen=True)
class Best:
    """The round with the best validation score, and what was measured on the test set then.

    Attributes:
        round: Its number, counted from 1.
        score: Its validation score.
        accuracy: Of the main model.
        sizes: Accuracy of each deployed size.
    """

    round: int
    score: float
    accuracy: float
    sizes: Mapping[str, float]


@dataclass(frozen=True)
class Totals:
    """What a run has cost so far; saved with each checkpoint.

    Attributes:
        rounds: Rounds done.
        bytes_up: Sent by devices.
        bytes_down: Sent to devices.
        flops: Spent by devices.
        seconds: Wall time, over all sessions.
        peak_bytes: Highest metered peak of each device class.
        refused: Devices that could not take part: class, reason, how often, and which (at first).
        accuracy: Of the main model at the last evaluation.
        sizes: Accuracy of each deployed size at the last evaluation.
        validation: What devices got at the last evaluation; empty if they have no samples for that.
        best: The best round so far, by its validation score.
        since: Evaluations after it.
        passes: Passes over its data that each device was asked for, by its number, where gradients
            are clipped sample by sample.
    """

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    flops: int = 0
    seconds: float = 0.0
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[Mapping[str, Any], ...] = ()
    accuracy: float | None = None
    sizes: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[str, Any] = field(default_factory=dict)
    best: Best | None = None
    since: int = 0
    passes: Mapping[str, int] = field(default_factory=dict)

    @property
    def failure(self) -> str | None:
        """Why nothing was learned; None once an update has been merged."""
        if self.peak_bytes:  # Every class that trained has a peak.
            return None
        reason = max(self.refused, key=lambda entry: entry["times"], default={}).get("reason", "")
        return (
            f"no update was merged in {self.rounds} rounds, so the model is still untrained; "
            f"the most frequent reason: {reason or 'nobody was asked'}"
        )


class RunFolder:
    """A run's folder, held by one process at a time; opening it can bring changes of the config."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.devices = self.checkpoints / "devices"
        self.partition = path / "partition.safetensors"
        self.served = path / "devices.json"
        self.changes: list[Change] = []
        self._logs = [path / "updates.jsonl", path / "history.jsonl"]
        self._lock = path / ".lock"
        self._held: int | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._writing: list[Future[None]] = []
        # Device files that were replaced before the newest checkpoint, and those that were since.
        self._stale: list[str] = []
        self._replaced: list[str] = []

    @classmethod
    def create(cls, path: Path, chosen: Config) -> "RunFolder":
        """Make the folder of a new run."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"{str(path)!r} exists and is not empty; choose another --out, "
                f"or go on with it by `sizewise resume {shlex.quote(str(path))}`"
            )
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            resuming.start(path, chosen)
            folder.devices.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"the run folder {str(path)!r} cannot be made: {error}") from None
        folder.hold()
        return folder

    @classmethod
    def open(cls, path: Path, overrides: Sequence[str] = ()) -> tuple["RunFolder", Config]:
        """Open the folder of an earlier run, to go on with it; overrides: see `resuming`."""
        resuming.read(path, overrides)  # Nothing is touched in a folder that is none.
        folder = cls(path)
        folder.devices.mkdir(parents=True, exist_ok=True)
        folder.hold()
        try:
            chosen, folder.changes = resuming.go_on(path, overrides)
        except BaseException:
            folder.release()
            raise
        return folder, chosen

    def hold(self) -> None:
        """Keep other processes out until this one ends or lets go."""
        self._held = os.open(self._lock, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise CheckpointError(
                f"{str(self.path)!r} is in use by another process; wait for it or stop it"
            ) from None

    def release(self) -> None:
        """Finish what is being written, and let other processes in."""
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def wait(self) -> None:
        """Wait until all is written; raise OSError if something could not be."""
        while self._writing:
            self._writing.pop(0).result()

    def _soon(self, write: Callable[..., None], *content: Any) -> None:
        """Write something beside what comes next: all in order, and nothing after a failure."""
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "writer")
        before = self._writing[-1] if self._writing else None

        def work() -> None:
            if before is not None:
                before.result()  # It is done by now, and raises what it could not do.
            write(*content)

        self._writing.append(self._writer.submit(work))

    def log(self, updates: Iterable[Mapping[str, Any]], history: Mapping[str, Any]) -> None:
        """Append the lines of a round, once those of the round before are there."""
        self.wait()
        self._soon(self._append, updates, history)

    def _append(self, updates: Iterable[Mapping[str, Any]], history: Mapping[str, Any]) -> None:
        for path, lines in zip(self._logs, (updates, [history]), strict=True):
            with path.open("ab") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())

    def describe(self, benefit: Benefit) -> None:
        """Write what each device gets by now."""
        rows = ",\n".join(json.dumps(plain(served)) for served in benefit.devices)
        self._soon(checkpoint.write_bytes, self.served, f"[{rows}]\n".encode())

    def remember(self, update: Update) -> str:
        """Write what a device wants to remember and return the path of the file.

        Files carry the round in their name: until the checkpoint that names them is there, the
        files of earlier rounds still count.
        """
        number, rounds = update.plan.device, update.plan.round + 1
        path = self.devices / f"device-{number:06d}-round-{rounds:06d}.safetensors"
        checkpoint.write_tensors(path, update.device_state, {})
        return str(path)

    def remembering(self, state: State, written: Mapping[int, str]) -> State:
        """Return the state that knows where its devices' newest files are."""
        if not written:
            return state
        paths = getattr(state.devices, "paths", {})
        self._replaced += [paths[number] for number in written if number in paths]
        return replace(state, devices=DeviceFiles({**paths, **written}))

    def save(self, state: State, totals: Totals) -> None:
        """Make a round durable, with the lines that were logged before."""
        self._soon(self._save, state, totals, self._stale)
        self._stale, self._replaced = self._replaced, []

    def _save(self, state: State, totals: Totals, stale: Iterable[str]) -> None:
        tensors = {f"tensors/{name}": tensor for name, tensor in state.tensors.items()}
        tensors |= {f"server_state/{name}": tensor for name, tensor in state.server_state.items()}
        paths = getattr(state.devices, "paths", {})
        facts = {
            "totals": plain(totals),
            "metadata": state.metadata,
            "devices": {number: Path(path).name for number, path in paths.items()},
            "logs": [path.stat().st_size for path in self._logs],
        }
        path = checkpoint.path_of(self.checkpoints, totals.rounds)
        checkpoint.write_tensors(path, tensors, facts)
        checkpoint.prune(self.checkpoints)
        for name in stale:
            Path(name).unlink(missing_ok=True)

    def keep(self, state: State, totals: Totals, owners: Iterable[int]) -> None:
        """Keep what the best round deploys, until there is a better one.

        Devices that own a deployed model have it in files that come and go, so it is copied.
        """
        self._soon(self._keep, state, totals, sorted(owners))

    def _keep(self, state: State, totals: Totals, owners: Iterable[int]) -> None:
        tensors = {f"tensors/{name}": tensor for name, tensor in state.tensors.items()}
        for number in owners:
            own = state.devices[number]
            tensors |= {f"devices/{number}/{name}": tensor for name, tensor in own.items()}
        facts = {"totals": plain(totals), "metadata": state.metadata, "owners": list(owners)}
        checkpoint.write_tensors(
            checkpoint.best_of(self.checkpoints, totals.rounds), tensors, facts
        )

    def best(self) -> tuple[State, Totals] | None:
        """Return the best round, to look at: what it deploys; None before there is one."""
        found = self.newest()
        if found is None or found[1].best is None:
            return None
        path = checkpoint.best_of(self.checkpoints, found[1].best.round)
        stored, facts = checkpoint.read_tensors(path)
        tensors: dict[str, Tensor] = {}
        devices: dict[int, dict[str, Tensor]] = {number: {} for number in facts["owners"]}
        for name, tensor in stored.items():
            part, _, own = name.partition("/")
            if part == "tensors":
                tensors[own] = tensor
            else:
                number, _, own = own.partition("/")
                devices[int(number)][own] = tensor
        state = State(tensors, metadata=facts["metadata"], devices=devices)
        return state, build(Totals, facts["totals"])

    def restore(self) -> tuple[State, Totals] | None:
        """Return the newest durable round, with the logs cut back to it; None before the first."""
        self.wait()
        newest = checkpoint.newest(self.checkpoints)
        if newest is None:
            for log in self._logs:
                log.unlink(missing_ok=True)
            return None
        state, totals, lengths = self._read(newest)
        for log, length in zip(self._logs, lengths, strict=True):
            if not log.exists() or log.stat().st_size < length:
                raise CheckpointError(
                    f"{str(log)!r} is missing or shorter than its checkpoint says; "
                    f"restore it or start a new run"
                )
            os.truncate(log, length)
        checkpoint.forget_later(self.checkpoints, totals.rounds)
        return state, totals

    def newest(self) -> tuple[State, Totals] | None:
        """Return the newest durable round, to look at; nothing is changed, a run may go on."""
        path = checkpoint.newest(self.checkpoints)
        return None if path is None else self._read(path)[:2]

    def _read(self, path: Path) -> tuple[State, Totals, list[int]]:
        """Return what a checkpoint holds, and how long the logs were then."""
        stored, facts = checkpoint.read_tensors(path)
        if "metadata" not in facts:
            raise CheckpointError(
                f"{str(path)!r} was written by an older sizewise, which kept other facts; finish "
                f"the run with that version, or start a new one"
            )
        parts: dict[str, dict[str, Any]] = {"tensors": {}, "server_state": {}}
        for name, tensor in stored.items():
            part, _, own = name.partition("/")
            parts[part][own] = tensor
        devices = {int(n): str(self.devices / name) for n, name in facts["devices"].items()}
        state = State(metadata=facts["metadata"], devices=DeviceFiles(devices), **parts)
        return state, build(Totals, facts["totals"]), facts["logs"]

    def finish(self, state: State, result: Mapping[str, Any]) -> None:
        """Write the final tensors and the result, when all rounds are durable."""
        self.wait()
        facts = {"rounds": result["rounds"], "sizes": result["sizes"]}
        checkpoint.write_tensors(self.path / "final.safetensors", state.tensors, facts)
        if (best := self.best()) is not None:
            facts = {"rounds": best[1].rounds, "sizes": best[1].sizes}
            checkpoint.write_tensors(self.path / "best.safetensors", best[0].tensors, facts)
        checkpoint.write_bytes(self.path / "result.json", json.dumps(result, indent=1).encode())
