"""The memory of a process and of everything that it started (Linux)."""

import threading
from pathlib import Path


def children() -> dict[int, list[int]]:
    """Return the children of every process."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # It has ended.
            found.setdefault(parent, []).append(int(entry.name))
    return found


def proportional_bytes(process: int) -> int:
    """Return a process's memory, of shared pages only its share (PSS); 0 if it has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


class Sampler:
    """Looks at a tree of processes now and then, and remembers the most that it held.

    Attributes:
        root: The process at the top.
        members: All processes that were ever seen in the tree: one whose parent has ended is no
            longer below the root, and still counts.
        peak: Most bytes of the whole tree.
        root_peak: Most bytes of the process at the top.
    """

    def __init__(self, root: int, interval: float = 0.5) -> None:
        self.root, self.members = root, {root}
        self.peak = self.root_peak = 0
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._look()
            self._ended.wait(self._interval)

    def _look(self) -> None:
        below, queue = children(), list(self.members)
        while queue:
            for child in below.get(queue.pop(), []):
                if child not in self.members:
                    self.members.add(child)
                    queue.append(child)
        own = proportional_bytes(self.root)
        others = sum(proportional_bytes(process) for process in self.members - {self.root})
        self.root_peak = max(self.root_peak, own)
        self.peak = max(self.peak, own + others)
