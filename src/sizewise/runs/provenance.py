"""What a run folder knows of its data: hashes, a tokenizer, and what was said about it.

`partition.json` holds the hashes, and `tokenizer.json` the tokenizer itself, so that a run does not
depend on a file elsewhere. Nobody goes on with other data, or with another tokenizer.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from sizewise.data.texts import own_tokenizer, tokenizer_of
from sizewise.errors import CheckpointError
from sizewise.exchange import checkpoint
from sizewise.runs.preparation import Setting

DESCRIBED = "partition.json"
TOKENIZER = "tokenizer.json"


def tokenizer_in(setting: Setting) -> str:
    """Return the tokenizer of a run's texts, as JSON; nothing for other data."""
    chosen = setting.config
    name = chosen.data.tokenizer or own_tokenizer(chosen.model.weights)
    return tokenizer_of(setting.dataset, name)


def hashes(setting: Setting) -> dict[str, str]:
    """Return a hash of the data, and one of the tokenizer if there is one."""
    tokens = tokenizer_in(setting)
    found = {"data_sha256": setting.dataset.fingerprint()}
    if tokens:
        found["tokenizer_sha256"] = hashlib.sha256(tokens.encode()).hexdigest()
    return found


def write(path: Path, setting: Setting, counts: dict[str, Any]) -> None:
    """Record the data of a new run, with the counts of its partition, in the run's folder."""
    if tokens := tokenizer_in(setting):
        checkpoint.write_bytes(path / TOKENIZER, tokens.encode())
    notes = list(setting.dataset.notes)
    described = {**hashes(setting), **counts, **({"notes": notes} if notes else {})}
    checkpoint.write_bytes(path / DESCRIBED, json.dumps(described).encode())


def check(path: Path, setting: Setting) -> None:
    """Raise CheckpointError unless the data is what the run in a folder was started with."""
    known = json.loads((path / DESCRIBED).read_text(encoding="utf-8"))
    data, found = setting.config.data, hashes(setting)
    if known.get("tokenizer_sha256") not in (None, found.get("tokenizer_sha256")):
        raise CheckpointError(
            f"the tokenizer is not what {str(path)!r} was started with; give that one again, "
            f"which is kept there: --set data.tokenizer={path / TOKENIZER}"
        )
    if known["data_sha256"] != found["data_sha256"]:
        raise CheckpointError(
            f"the data is not what {str(path)!r} was started with; restore {data.name!r} or give "
            "the data that was in memory, or start a new run"
        )
