"""A run that is stopped at any moment goes on to the same bits.

Real kills are few, because each costs a start of Python and torch. The crash test stands in for
all others: it stops a run before and after every single file that becomes visible.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sizewise import config
from sizewise.errors import CheckpointError
from sizewise.exchange import checkpoint
from sizewise.exchange.state import State
from sizewise.runs import preparation, session
from sizewise.runs.folder import RunFolder

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108

ADAM: dict[str, Any] = {
    "rounds": 30,
    "model": {"name": "cnn", "args": {"layers": [4, 8]}},
    "data": {"partition": "shards", "validation": 0.2},
    "fleet": {"devices": 20, "per_round": 6, "budgets": ["10kB", "2MB", "3MB"]},
    "method": {"name": "fedadam"},
    "recipe": {"norm": "tracked", "schedule": "cosine", "eval_every": 2},
    "engine": {"workers": 2},
}
ALONE: dict[str, Any] = {
    "rounds": 40,
    "model": {"name": "mlp", "args": {"hidden": [16]}},
    "fleet": {"devices": 8, "per_round": 3},
    "method": {"name": "local"},
}
IN: dict[str, Any] = {
    "rounds": 14,
    "model": {"name": "fedin_b", "args": {"base": 2}},
    "data": {"train_limit": 160, "test_limit": 40},
    "fleet": {
        "per_round": 3,
        "group": [{"count": 2}, {"count": 2, "model": "fedin_e"}],
    },
    "method": {"name": "fedin", "noise": 0.1},
    "recipe": {"batch": 16, "eval_every": 7},
    "engine": {"workers": 2},
}
GKT: dict[str, Any] = {
    "rounds": 14,
    "model": {"name": "cnn", "args": {"layers": [4, 6, 8]}},
    "data": {"train_limit": 160, "test_limit": 40},
    "fleet": {"devices": 4, "per_round": 3},
    "method": {
        "name": "fedgkt",
        "client": "cnn",
        "client_args": {"layers": [4, 6]},
        "server_epochs": 2,
        "noise": 0.1,
    },
    "recipe": {"eval_every": 7},
    "engine": {"workers": 2},
}


def train(tables: dict[str, Any], path: Path) -> dict[str, Any]:
    """Do a whole run in this process; one worker gives what any number of them gives."""
    chosen = config.from_dict({**tables, "engine": {"workers": 1}})
    with session.started(chosen, path) as federation:
        return federation.run()


def resume(path: Path) -> dict[str, Any]:
    """Go on with a run in this process."""
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("workers = 2", "workers = 1"))
    with session.resumed(path) as federation:
        return federation.run()


def facts(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return all of a run that must not depend on how it came about."""

    def lines(name: str) -> list[dict[str, Any]]:
        parsed = [json.loads(line) for line in (path / name).read_text().splitlines()]
        return [{k: v for k, v in line.items() if k != "seconds"} for line in parsed]

    state, totals = RunFolder(path).restore() or pytest.fail("no checkpoint")
    best, _ = RunFolder(path).best() or (State({}), totals)
    return {
        "best": [checkpoint.sha256(own) for own in (best.tensors, *best.devices.values())],
        "files": sorted(p.name for p in path.rglob("*best*")),
        "served": (path / "devices.json").read_text() if best.tensors else "",
        "result": {k: v for k, v in result.items() if k not in ("seconds", "run_dir")},
        "history": lines("history.jsonl"),
        "updates": lines("updates.jsonl"),
        "partition": (path / "partition.json").read_text(),
        "moments": checkpoint.sha256(state.server_state),
        "devices": {n: checkpoint.sha256(tensors) for n, tensors in state.devices.items()},
        "final": checkpoint.sha256(checkpoint.read_tensors(path / "final.safetensors")[0]),
        "rounds": totals.rounds,
    }


def rounds(path: Path) -> int:
    history = path / "history.jsonl"
    return history.read_bytes().count(b"\n") if history.exists() else 0


class Command:
    """A `sizewise` of its own, in a session of its own as in a terminal."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sizewise.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def stop(self, number: signal.Signals, when: Callable[[], bool]) -> tuple[int, str, str]:
        """Send a signal as soon as something holds; return exit code, stdout, stderr.

        Workers hold the other ends of the pipes, so this returns only after they have ended too.
        """
        deadline = time.monotonic() + 60
        while not when():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        self.workers = children(self.process.pid)
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


def children(parent: int) -> list[int]:
    """Return the processes that descend from one."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
    found = [parent]
    for ancestor in found:
        found += [pid for pid, ppid in pairs if ppid == ancestor]
    return found[1:]


def gone(pid: int) -> bool:
    """Tell whether a process has ended, waiting for it a little."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
        )
        if not shown.stdout.strip() or shown.stdout.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted run with a stateful server optimiser gives."""
    path = tmp_path_factory.mktemp("adam") / "run"
    return facts(train(ADAM, path), path)


def written(tables: dict[str, Any], path: Path) -> str:
    """Write a config file and return its path."""
    import tomli_w

    path.write_text(tomli_w.dumps(tables))
    return str(path)


def test_killed_at_start_up_and_in_mid_run_with_workers(
    adam: dict[str, Any], tmp_path: Path
) -> None:
    before = set(SHARED_MEMORY.glob("*"))
    run = tmp_path / "run"
    first = Command("run", written(ADAM, tmp_path / "c.toml"), "--out", str(run))
    code, out, err = first.stop(signal.SIGKILL, (run / "config.toml").exists)
    assert (code, out) == (-signal.SIGKILL, "")
    assert "Traceback" not in err
    assert rounds(run) < 3

    second = Command("resume", str(run))
    code, out, err = second.stop(signal.SIGKILL, lambda: rounds(run) >= 7)
    assert (code, out) == (-signal.SIGKILL, "")
    assert "Traceback" not in err
    assert rounds(run) < ADAM["rounds"]
    assert len(second.workers) == 2
    assert all(gone(pid) for pid in first.workers + second.workers)
    assert set(SHARED_MEMORY.glob("*")) <= before

    assert facts(resume(run), run) == adam


def test_interrupted_from_the_terminal(adam: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = Command("run", written(ADAM, tmp_path / "c.toml"), "--out", str(run), "--json")
    code, out, err = command.stop(signal.SIGINT, lambda: rounds(run) >= 2)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == f"interrupted; go on with: sizewise resume {run}"
    assert all(gone(pid) for pid in command.workers)
    assert 2 <= rounds(run) < ADAM["rounds"]

    assert facts(resume(run), run) == adam


@pytest.mark.parametrize(
    ("tables", "devices"), [(ALONE, 8), (IN, 4), (GKT, 4)], ids=["local", "fedin", "fedgkt"]
)
def test_killed_while_devices_remember(
    tables: dict[str, Any], devices: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = Command("run", written(tables, tmp_path / "c.toml"), "--out", str(run))
    enough = tables["rounds"] // 4 + 1
    code, _, _ = command.stop(signal.SIGKILL, lambda: rounds(run) >= enough)
    assert code == -signal.SIGKILL
    assert rounds(run) < tables["rounds"]
    expected = facts(train(tables, tmp_path / "whole"), tmp_path / "whole")
    assert len(expected["devices"]) == devices
    assert facts(resume(run), run) == expected


def test_a_finished_run_is_told_again_and_not_changed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train({**ALONE, "rounds": 3}, run)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    for _ in range(3):
        assert resume(run) == result
        after = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
        assert after == before


def test_one_process_at_a_time(tmp_path: Path) -> None:
    chosen = config.from_dict({**ALONE, "rounds": 2})
    with session.started(chosen, tmp_path / "run") as federation:
        with pytest.raises(CheckpointError, match="in use by another process"):
            resume(tmp_path / "run")
        expected = federation.run()
    assert resume(tmp_path / "run") == expected


def test_memories_that_no_checkpoint_names_are_deleted(tmp_path: Path) -> None:
    tables = {**ALONE, "fleet": {"devices": 3, "per_round": 3}, "rounds": 6}
    expected = facts(train(tables, tmp_path / "run"), tmp_path / "run")
    files = sorted(path.name for path in (tmp_path / "run/checkpoints/devices").iterdir())
    assert files == [
        f"device-{device:06d}-round-{number:06d}.safetensors"
        for device in range(3)
        for number in (5, 6)
    ]
    # What the checkpoint before the newest needs is still there.
    (tmp_path / "run/checkpoints/round-000006.safetensors").unlink()
    assert facts(resume(tmp_path / "run"), tmp_path / "run") == expected


EMPTY = checkpoint.sha256({})


class Crash(BaseException):
    """Stands for the end of the process."""


class Writes:
    """Counts the moments at which something has become durable, and crashes at one of them.

    A file is synced before it is renamed and its folder afterwards, a log once it has grown: so
    these are the moments between any two changes of the folder.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.crash_at = 0, -1
        fsync = os.fsync

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            self.count += 1
            if self.count == self.crash_at:
                raise Crash

        patch.setattr(os, "fsync", synced)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


@pytest.mark.parametrize(
    ("save_every", "more"),
    [(1, {}), (2, {"stop": {"patience": 1}, "rounds": 9})],
    ids=["each", "stopped"],
)
def test_a_crash_at_every_write(
    save_every: int,
    more: dict[str, Any],
    writes: Writes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = {
        **ALONE,
        "rounds": 3,
        "model": {"name": "linear"},
        "fleet": {"devices": 3, "per_round": 2},
        "recipe": {"server": "fedavgm"},
        "data": {"train_limit": 60, "test_limit": 20},
        "engine": {"save_every": save_every},
        **more,
    }
    if more:
        tables["data"] = {"train_limit": 90, "test_limit": 20, "validation": 0.3}
        tables["fleet"] = {"devices": 2, "per_round": 1}
    chosen = config.from_dict(tables)
    data = preparation.prepare(chosen).dataset
    monkeypatch.setattr(preparation.sources, "load", lambda *names, **options: data)
    with session.started(chosen, tmp_path / "whole") as federation:
        # What is written before the first round is the same in all of these runs.
        first = writes.count if more else 1
        expected = facts(federation.run(), tmp_path / "whole")
    assert expected["rounds"] < chosen.rounds if more else expected["best"] == [EMPTY]
    total, tried = writes.count, 0
    assert total > 25
    for crash_at in range(first, total + 1):
        run = tmp_path / str(crash_at)
        writes.count, writes.crash_at = 0, crash_at
        with pytest.raises(Crash), session.started(chosen, run) as federation:
            federation.run()
        writes.crash_at = -1
        if (run / "config.toml").exists():
            assert facts(resume(run), run) == expected, f"crash at write {crash_at}"
            tried += 1
        shutil.rmtree(run)
    assert tried == total - max(first - 1, 1)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_serves(
    damage: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    tables = {**ADAM, "rounds": 3, "model": {"name": "linear"}}
    tables["fleet"] = {"devices": 10, "per_round": 3}
    expected = facts(train(tables, run), run)
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    data = bytearray(newest.read_bytes())
    if damage == "flipped":
        data[-100] ^= 1
    newest.write_bytes({"flipped": data, "truncated": data[:-9], "empty": b""}[damage])
    logs = [(run / name).read_bytes() for name in ("updates.jsonl", "history.jsonl")]
    with pytest.raises(CheckpointError, match=r"round-000003.safetensors' is damaged .* delete it"):
        resume(run)
    assert [(run / name).read_bytes() for name in ("updates.jsonl", "history.jsonl")] == logs
    newest.unlink()
    assert facts(resume(run), run) == expected


def test_logs_shorter_than_their_checkpoint_are_noticed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train({**ALONE, "rounds": 2}, run)
    (run / "history.jsonl").write_text("")
    with pytest.raises(CheckpointError, match=r"history.jsonl' is missing or shorter"):
        resume(run)


def test_files_are_whole_or_not_there(tmp_path: Path, writes: Writes) -> None:
    path = tmp_path / "state.safetensors"
    checkpoint.write_tensors(path, {"w": torch.ones(3)}, {"round": 1})
    for crash_at in (1, 2):
        writes.count, writes.crash_at = 0, crash_at
        with contextlib.suppress(Crash):
            checkpoint.write_tensors(path, {"w": torch.zeros(3)}, {"round": 2})
        tensors, known = checkpoint.read_tensors(path)
        assert (float(tensors["w"][0]), known["round"]) in [(1.0, 1), (0.0, 2)]
