"""Going on with a run: its config must be the one that it was started with.

The run folder keeps the config twice: `config.toml` for people, and in `config.record.json` as the
run has it, with all changes that were made on the way. Where the two differ, the run would become a
mixture of two runs, so it does not go on. What does not change results may change at any time;
`rounds` may grow, if `--set rounds=N` says so.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from sizewise import config
from sizewise.common.structure import flat, plain
from sizewise.config import Config
from sizewise.errors import CheckpointError
from sizewise.exchange import checkpoint
from sizewise.steps.recipe import Recipe

RECORD = "config.record.json"

FREE = (
    "engine.workers",
    "engine.save_every",
    "engine.flower",
    "data.root",
    "data.tokenizer",
    "model.sha256",
    "stop",
)
"""What may change on the way: how a run is carried out and when it stops, not what it computes. The
data of another folder must have the same fingerprint, and a tokenizer at another place the same
content. The hash of a model's structure may change with the version of torch."""

SHOWN = 5
"""Keys that an error names."""


@dataclass(frozen=True)
class Change:
    """A key of the config, a dotted path, that changed when so many rounds were done.

    What was not given is None.
    """

    key: str
    before: Any
    after: Any
    round: int
    time: str


def start(folder: Path, chosen: Config) -> None:
    """Write the config of a new run, for people and for the record."""
    # The config comes first: with it the folder can be resumed, without it it is empty.
    _write_config(folder, chosen)
    _write_record(folder, chosen, None, ())


def read(folder: Path, overrides: Iterable[str] = ()) -> Config:
    """Return the config that a run would go on with; nothing is written.

    Raises:
        CheckpointError: Something else than what may change is different.
    """
    return _compared(folder, tuple(overrides))[1]


def go_on(folder: Path, overrides: Iterable[str] = ()) -> tuple[Config, list[Change]]:
    """Return the config that a run goes on with, and what is different from now on; record both.

    Overrides are values to change on the way, as `a.b=value`. A crash at any moment leaves a folder
    that goes on: the record names the config before a change until the file follows.

    Raises:
        CheckpointError: Something else than what may change is different.
    """
    known, chosen, record = _compared(folder, tuple(overrides))
    done = checkpoint.rounds_done(folder / "checkpoints")
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    different = _differences(known, chosen)
    changes = [Change(key, *values, done, now) for key, values in different]
    noted = [*(record or {}).get("changes", ()), *map(plain, changes)]
    if changes:
        # The run is not done any more; its result comes back when it is.
        (folder / "result.json").unlink(missing_ok=True)
        _write_record(folder, chosen, known, noted)
    if config.load(folder / "config.toml") != chosen:
        _write_config(folder, chosen)
    # A folder of an earlier version has no record: from now on it is guarded.
    if changes or record is None or record["before"] is not None:
        _write_record(folder, chosen, None, noted)
    return chosen, changes


def sentences(changes: Iterable[Change], recipe: Recipe) -> list[str]:
    """Return what is different from now on, for people."""
    told = []
    for change in changes:
        told.append(f"{change.key} was {_shown(change.before)} and is {_shown(change.after)}")
        if change.key == "rounds" and any(
            recipe.lr_at(n, change.before) != recipe.lr_at(n, change.after)
            for n in range(change.after)
        ):
            told.append(
                f"recipe.schedule depends on the number of rounds: from round {change.round + 1} "
                f"on, lr is that of a run of {change.after}; before, of one of {change.before}"
            )
    return told


def _compared(
    folder: Path, overrides: tuple[str, ...]
) -> tuple[Config, Config, dict[str, Any] | None]:
    """Return the recorded config, the one that is wanted, and the record."""
    path = folder / "config.toml"
    if not path.is_file():
        raise CheckpointError(
            f"{str(folder)!r} is not a run folder (it has no config.toml); "
            f"give the folder that `sizewise run` printed"
        )
    found, record = config.load(path), _record(folder)
    known = found if record is None else config.from_dict(record["config"])
    if record and record["before"] and found == config.from_dict(record["before"]):
        found = known  # A crash came before the file followed the record.
    chosen = config.from_dict(config.assigned(found.to_dict(), overrides))
    asked = {override.partition("=")[0].strip() for override in overrides}
    wrong = [
        f"{key} was {_shown(before)} and is {_shown(after)}"
        for key, (before, after) in _differences(known, chosen)
        if not _may_change(key, before, after, asked)
    ]
    if wrong:
        raise CheckpointError(
            f"the config is not what {str(folder)!r} was started with: "
            f"{', '.join(wrong[:SHOWN])}; put it back, or start a new run; while a run is under "
            f"way, rounds may grow (--set rounds=N) and {', '.join(FREE)} may change, nothing else"
        )
    return known, chosen, record


def _record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a run's config; None in folders of earlier versions."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except ValueError as error:
        raise CheckpointError(
            f"{str(path)!r} is damaged ({error}); delete it to go on with config.toml as it is"
        ) from None


def _may_change(key: str, before: Any, after: Any, asked: set[str]) -> bool:
    if key == "rounds":
        return key in asked and bool(after > before)
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _differences(before: Config, after: Config) -> list[tuple[str, tuple[Any, Any]]]:
    """Return the keys in which two configs differ, with their values; None: not given."""
    old, new = dict(flat(before.to_dict())), dict(flat(after.to_dict()))
    return [
        (key, (old.get(key), new.get(key)))
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)


def _write_config(folder: Path, chosen: Config) -> None:
    text = tomli_w.dumps(chosen.to_dict())
    checkpoint.write_bytes(folder / "config.toml", text.encode())


def _write_record(
    folder: Path, chosen: Config, before: Config | None, changes: Iterable[Mapping[str, Any]]
) -> None:
    content = {
        "config": chosen.to_dict(),
        "before": None if before is None else before.to_dict(),
        "changes": list(changes),
    }
    checkpoint.write_bytes(folder / RECORD, json.dumps(content, indent=1).encode())
