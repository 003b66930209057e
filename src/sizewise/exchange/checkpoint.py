"""Files that survive a crash: written under a temporary name, synced, then renamed.

A reader sees either the old file or the whole new one. A checkpoint is one safetensors file; its
metadata holds the small facts as JSON, and a hash of facts and tensors, so damage is noticed.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sizewise.errors import CheckpointError
from sizewise.exchange.state import sha256

KEPT = 2
"""Checkpoints that stay on disk: the newest, and the one before it in case the newest is lost."""


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write named tensors and JSON-able facts into one safetensors file."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One entry: safetensors writes several in an order that differs from process to process.
    text = json.dumps({**facts, "sha256": _hash(own, facts)})
    write_bytes(path, save(own, metadata={"sizewise": text}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote; raise CheckpointError if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["sizewise"])
            expected = facts.pop("sha256")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(_damaged(path, str(error))) from None
    if _hash(tensors, facts) != expected:
        raise CheckpointError(_damaged(path, "its contents do not match their hash"))
    return tensors, facts


def _hash(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    return hashlib.sha256((sha256(tensors) + json.dumps(facts)).encode()).hexdigest()


def _damaged(path: Path, why: str) -> str:
    why = why.splitlines()[0] if why else "unknown reason"
    return (
        f"{str(path)!r} is damaged ({why}); "
        f"delete it to go on from the round before, or start a new run"
    )


def path_of(folder: Path, rounds: int) -> Path:
    """Return where the checkpoint after so many rounds lives."""
    return folder / f"round-{rounds:06d}.safetensors"


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None before its first round."""
    return max(folder.glob("round-*.safetensors"), default=None)


def rounds_done(folder: Path) -> int:
    """Return how many rounds of a run are durable."""
    found = newest(folder)
    return 0 if found is None else _number(found)


def best_of(folder: Path, rounds: int) -> Path:
    """Return where what was best after so many rounds lives."""
    return folder / f"best-{rounds:06d}.safetensors"


def prune(folder: Path) -> None:
    """Delete all but the newest checkpoints, and of what was best all that they do not speak of."""
    rounds = sorted(folder.glob("round-*.safetensors"))
    for path in rounds[:-KEPT]:
        path.unlink()
    best = sorted(folder.glob("best-*.safetensors"))
    # A checkpoint speaks of the best round up to its own.
    kept = {
        max((b for b in best if _number(b) <= _number(r)), default=None) for r in rounds[-KEPT:]
    }
    for path in set(best) - kept:
        path.unlink()


def forget_later(folder: Path, rounds: int) -> None:
    """Delete what was best after more rounds than are durable: they are done again."""
    for path in folder.glob("best-*.safetensors"):
        if _number(path) > rounds:
            path.unlink()


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


class DeviceFiles(Mapping[int, Mapping[str, Tensor]]):
    """What devices remember between rounds, in one file each, read when asked for."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.paths = dict(paths)

    def __getitem__(self, device: int) -> dict[str, Tensor]:
        return read_tensors(Path(self.paths[device]))[0]

    def __contains__(self, device: object) -> bool:
        return device in self.paths  # without reading the file, as a Mapping would

    def __iter__(self) -> Iterator[int]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)
