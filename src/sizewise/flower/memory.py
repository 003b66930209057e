"""What a device remembers, on the device: versions of it, each named by its hash.

The server says which version the next round builds on. It is the newest one, unless that round's
update was late or refused, or the server lost the round in a crash; so the one before is kept too.

Versions live in the context of the Flower run. A server that is started again is a new run to
Flower and finds the context empty; a node with a `state-dir` keeps its versions in files instead.
"""

from pathlib import Path

from flwr.app import RecordDict

from sizewise.errors import CheckpointError
from sizewise.exchange import checkpoint
from sizewise.exchange.state import sha256
from sizewise.exchange.view import Tensors
from sizewise.flower import wire

_PREFIX = "memory-"


class Versions:
    """The versions of one device's memory."""

    def __init__(self, records: RecordDict, folder: Path | None) -> None:
        self._records, self._folder = records, folder

    def read(self, version: str) -> Tensors | None:
        """Return what a version holds; None if it is not there."""
        if self._folder is None:
            record = self._records.get(_PREFIX + version)
            return None if record is None else wire.unpack(record)
        try:
            return checkpoint.read_tensors(self._folder / f"{version}.safetensors")[0]
        except CheckpointError:
            return None

    def write(self, tensors: Tensors, base: str) -> str:
        """Keep a new version and the one that it was made from; return its name."""
        version = sha256(tensors)
        if self._folder is None:
            for name in [name for name in self._records if name.startswith(_PREFIX)]:
                if name != _PREFIX + base:
                    del self._records[name]
            self._records[_PREFIX + version] = wire.pack(tensors)
            return version
        self._folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write_tensors(self._folder / f"{version}.safetensors", tensors, {})
        for path in self._folder.glob("*.safetensors"):
            if path.stem not in (base, version):
                path.unlink()
        return version
