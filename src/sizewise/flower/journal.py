"""The journal of nodes: who came, who left, whose answer was late or strange.

It is `nodes.jsonl` in the run folder. What happens to a device's update is in `updates.jsonl`, as
on every engine; this is about the machines behind the devices. A resumed run goes on writing it.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("flwr")


class Journal:
    """Lines for `nodes.jsonl`, kept until there is a folder to write them to."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._waiting: list[str] = []

    def open(self, folder: Path) -> None:
        """Write to this folder from now on."""
        self._path = folder / "nodes.jsonl"
        self._flush()

    def note(self, event: str, node: int, **facts: Any) -> None:
        """Note what happened to a node."""
        # Node ids have 64 bits, more than a JSON number can be trusted with.
        line = {"time": round(time.time(), 3), "event": event, "node": str(node), **facts}
        log.info("sizewise: %s", ", ".join(f"{k} {v}" for k, v in line.items() if k != "time"))
        self._waiting.append(json.dumps(line) + "\n")
        self._flush()

    def _flush(self) -> None:
        if self._path is not None and self._waiting:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(self._waiting)
            self._waiting.clear()
