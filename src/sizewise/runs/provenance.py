"""What a run folder knows of its data: hashes, a tokenizer, and what was said about it.

`partition.json` holds the hashes, and `tokenizer.json` the tokenizer itself, so that a run does not
depend on a file elsewhere. Nobody goes on with other data, or with another tokenizer.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sizewise.config import Config
from sizewise.data.texts import own_tokenizer, tokenizer_of, tokenizer_text
from sizewise.errors import CheckpointError
from sizewise.exchange import checkpoint
from sizewise.runs.preparation import Setting

DESCRIBED = "partition.json"
TOKENIZER = "tokenizer.json"


def tokenizer_in(setting: Setting) -> str:
    """Return the tokenizer of a run's texts, as JSON; nothing for other data."""
    return tokenizer_of(setting.dataset, _named(setting.config))


def write(path: Path, setting: Setting, counts: Mapping[str, object]) -> None:
    """Record the data of a new run, with the counts of its partition, in the run's folder."""
    described: dict[str, object] = {"data_sha256": setting.dataset.fingerprint()}
    if tokens := tokenizer_in(setting):
        checkpoint.write_bytes(path / TOKENIZER, tokens.encode())
        described["tokenizer_sha256"] = _hash(tokens)
    if setting.dataset.notes:
        described["notes"] = list(setting.dataset.notes)
    described |= counts
    checkpoint.write_bytes(path / DESCRIBED, json.dumps(described).encode())


def check_tokenizer(path: Path, config: Config) -> None:
    """Raise CheckpointError if a config names another tokenizer than the run in a folder has."""
    if not (path / DESCRIBED).is_file():
        return
    known, name = _described(path).get("tokenizer_sha256"), _named(config)
    if known is not None and name is not None and _hash(tokenizer_text(name)) != known:
        raise CheckpointError(
            f"the tokenizer is not what {str(path)!r} was started with; give that one again, "
            f"which is kept there: --set data.tokenizer={path / TOKENIZER}"
        )


def check(path: Path, setting: Setting) -> None:
    """Raise CheckpointError unless the data is what the run in a folder was started with."""
    if _described(path)["data_sha256"] != setting.dataset.fingerprint():
        raise CheckpointError(
            f"the data is not what {str(path)!r} was started with; restore "
            f"{setting.config.data.name!r} or give the data that was in memory, or start a new run"
        )


def _described(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / DESCRIBED).read_text(encoding="utf-8"))
    return found


def _named(config: Config) -> str | None:
    return config.data.tokenizer or own_tokenizer(config.model.weights)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
