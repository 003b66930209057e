"""Decoded data sets on disk, because decoding 60,000 images takes ten seconds and reading none.

One safetensors file per data set and image size, memory-mapped when read: worker processes share
its pages. A cache is never needed: a damaged file is made again, an unwritable folder is reported.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sizewise.data.dataset import Dataset
from sizewise.errors import DataError

FORMAT = 5  # Part of every key: raise it when what is stored changes meaning.
_TENSORS = ("train_inputs", "train_labels", "test_inputs", "test_labels", "groups")

log = logging.getLogger(__name__)


def location(name: str, *key: object) -> Path:
    """Return where the data set made from ``key`` (files, image size, ...) is kept."""
    home = os.environ.get("SIZEWISE_CACHE") or Path.home() / ".cache" / "sizewise"
    digest = hashlib.blake2b(repr((FORMAT, key)).encode(), digest_size=8).hexdigest()
    return Path(home) / "data" / f"{name.replace('/', '--')}-{digest}.safetensors"


def read(path: Path) -> Dataset | None:
    """Return the data set in a cache file, or None if there is none that can be read."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            facts: dict[str, Any] = json.loads(file.metadata()["dataset"])
            tensors = {key: file.get_tensor(key) for key in _TENSORS if key in file.keys()}  # noqa: SIM118  (not a mapping)
        facts |= {
            key: tuple(facts[key]) for key in ("class_names", "mean", "std", "silos", "notes")
        }
        return Dataset(**facts, **tensors)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, DataError) as error:
        log.warning("%s cannot be read (%s); it is made again", path, error)
        return None


def write(path: Path, dataset: Dataset) -> None:
    """Keep a data set; if that fails the run goes on without, and decodes again next time."""
    fields = {field.name: getattr(dataset, field.name) for field in dataclasses.fields(dataset)}
    tensors = {key: value for key in _TENSORS if (value := fields.pop(key)) is not None}
    # Unique per thread, so that processes that start together do not write into one file.
    draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, draft, metadata={"dataset": json.dumps(fields)})
        with draft.open("rb+") as file:
            os.fsync(file.fileno())  # Else a power cut can leave the name without the bytes.
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        log.warning("%s cannot be written (%s); decoding is repeated next time", path, error)
        with contextlib.suppress(OSError):
            draft.unlink()
