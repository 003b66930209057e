"""`metrics.prom` in the run folder: what a server does now, for people and for Prometheus.

It is a text file in the format that Prometheus reads, such as by node_exporter's textfile
collector. Counts begin anew when the server is started again, as is usual there.
"""

import re
import time
from pathlib import Path

from sizewise.engines import Outcome
from sizewise.exchange.plan import Update

NAME = "metrics.prom"
SELDOM = 1.0
"""Seconds between two versions of the file, at least."""

_HELP = {
    "round": ("gauge", "The round that is under way."),
    "nodes": ("gauge", "Devices whose node is connected."),
    "device_working": ("gauge", "1 for each device that was asked and has not answered yet."),
    "updates_total": ("counter", "Updates that came and were good."),
    "refused_total": ("counter", "Devices that were asked and sent nothing that could be merged."),
    "sent_bytes_total": ("counter", "Bytes of tensors that were sent to devices."),
    "received_bytes_total": ("counter", "Bytes of tensors in good updates."),
    "changed_seconds": ("gauge", "When this file was written, in Unix time."),
}


class Metrics:
    """What a server counts, and the file that tells of it."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._written = 0.0
        self._working: set[int] = set()
        self._values: dict[str, float] = {
            name: 0 for name in _HELP if name not in ("device_working", "changed_seconds")
        }

    def open(self, folder: Path) -> None:
        """Write to this folder from now on."""
        self._path = folder / NAME

    def asked(self, device: int, number: int, sent: int) -> None:
        """Note that a device works on a round, and what it was sent."""
        self._working.add(device)
        self._values["round"] = number
        self._values["sent_bytes_total"] += sent

    def answered(self, device: int, outcome: Outcome, received: int) -> None:
        """Note what became of a device's work."""
        self._working.discard(device)
        good = isinstance(outcome, Update)
        self._values["updates_total" if good else "refused_total"] += 1
        self._values["received_bytes_total"] += received if good else 0

    def write(self, nodes: int, now: bool = False) -> None:
        """Write the file, if it is there to be written and the last version is not too young."""
        if self._path is None or (not now and time.monotonic() - self._written < SELDOM):
            return
        self._written = time.monotonic()
        self._values["nodes"] = nodes
        draft = self._path.with_name(f".{NAME}.tmp")
        draft.write_text(self._text(), encoding="utf-8")
        draft.replace(self._path)

    def _text(self) -> str:
        values = {**self._values, "changed_seconds": round(time.time(), 3)}
        rows = []
        for name, (kind, text) in _HELP.items():
            rows += [f"# HELP sizewise_{name} {text}", f"# TYPE sizewise_{name} {kind}"]
            if name == "device_working":
                rows += [f'sizewise_{name}{{device="{n}"}} 1' for n in sorted(self._working)]
            else:
                rows.append(f"sizewise_{name} {values[name]}")
        return "\n".join(rows) + "\n"


def read_working(folder: Path) -> set[int]:
    """Return the devices that were at work when a run's file was written."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except OSError:
        return set()
    return {int(n) for n in re.findall(r'sizewise_device_working{device="(\d+)"} 1', text)}
