"""`sizewise flower status RUN`: who is there, what each does, and what it cost so far."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sizewise.common.structure import format_bytes
from sizewise.errors import ConfigError
from sizewise.flower import metrics
from sizewise.report import tables
from sizewise.report.fitted import Column, fitted


@dataclass(frozen=True)
class DeviceStatus:
    """A device of a run.

    Attributes:
        device: Its number.
        state: working, waiting, gone; finished once the run is; "unknown": it never had a node.
        node: The id of its last node.
        memory: The bytes that its owner gave.
        merged: Updates of it that were merged.
        refused: Rounds in which it was asked and nothing was merged.
        bytes_down: What it was sent, for updates that were merged.
        bytes_up: What it sent.
        seconds: How long it trained.
        reason: Why it was refused the last time, if its last round was one of those.
    """

    device: int
    state: str = "unknown"
    node: str | None = None
    memory: int | None = None
    merged: int = 0
    refused: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Status:
    """A run.

    Attributes:
        rounds: How many are done.
        finished: Whether all of them are.
        devices: Those that had a node or were asked, by number.
        refused_nodes: Nodes that are not in, and why, newest last.
    """

    rounds: int
    finished: bool
    devices: list[DeviceStatus]
    refused_nodes: dict[str, str] = field(default_factory=dict)


def read(folder: Path) -> Status:
    """Return the status of a run folder; raise ConfigError if it is none of a Flower run."""
    if not (folder / "nodes.jsonl").is_file():
        raise ConfigError(f"{str(folder)!r} is no run on Flower: it has no nodes.jsonl")
    finished = (folder / "result.json").is_file()
    found: dict[int, DeviceStatus] = {}
    strange: dict[str, str] = {}
    for line in _lines(folder / "nodes.jsonl"):
        node, event = line["node"], line["event"]
        if event in ("unusable", "refused"):
            strange[node] = line["reason"]
        if event not in ("joined", "left"):
            continue
        strange.pop(node, None)
        old = found.get(line["device"], DeviceStatus(line["device"]))
        if event == "joined":
            old = replace(old, state="waiting", node=node, memory=line["memory"])
        elif node == old.node:
            old = replace(old, state="gone")
        found[line["device"]] = old
    for line in _lines(folder / "updates.jsonl"):
        device = line["device"]
        found[device] = _with_round(found.get(device, DeviceStatus(device)), line)
    working = metrics.read_working(folder)
    for device, old in found.items():
        if finished:
            found[device] = replace(old, state="finished")
        elif device in working and old.state == "waiting":
            found[device] = replace(old, state="working")
    rounds = sum(1 for _ in _lines(folder / "history.jsonl"))
    return Status(rounds, finished, [found[n] for n in sorted(found)], strange)


def _with_round(old: DeviceStatus, line: dict[str, Any]) -> DeviceStatus:
    if line["refused"] is not None:
        return replace(old, refused=old.refused + 1, reason=line["refused"])
    return replace(
        old,
        merged=old.merged + 1,
        bytes_down=old.bytes_down + line["bytes_down"],
        bytes_up=old.bytes_up + line["bytes_up"],
        seconds=old.seconds + line["seconds"],
        reason=None,
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file that somebody may be writing to."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.rpartition("\n")[0].splitlines():
        yield json.loads(line)


def text(status: Status) -> str:
    """Return a status as a table."""
    rows = []
    for each in status.devices:
        memory = "-" if each.memory is None else format_bytes(each.memory)
        traffic = format_bytes(each.bytes_down), format_bytes(each.bytes_up)
        counts = str(each.merged), str(each.refused)
        rest = (*counts, *traffic, f"{each.seconds:.1f}", each.reason or "")
        rows.append((str(each.device), each.state, memory, *rest))
    names = ("device", "state", "memory", "merged", "refused", "down", "up", "seconds", "why")
    columns = [
        Column(name, [row[number] for row in rows], right=name != "why", wraps=name == "why")
        for number, name in enumerate(names)
    ]

    def show(console: Console) -> None:
        console.print(
            f"{status.rounds} rounds done, {'finished' if status.finished else 'under way'}"
        )
        for table in fitted(console.width, columns[:2], columns[2:]):
            console.print(table)
        for node, why in status.refused_nodes.items():
            console.print(f"node {node} is not in: {why}", soft_wrap=True)

    return tables.text(show)
