"""What a process takes and may take, as the system counts it: not tensors, but all of it.

A node that waits takes `BASE`. While it trains, a child takes the bytes that were predicted for a
step, what a process needs beside its tensors (`RESERVE`), and its message, which exists a few times
while it is read and answered.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

BASE = 215_000_000
"""What a waiting node takes, with torch and Flower imported; see benchmarks/flower.md."""

RESERVE = 48_000_000
"""What a child that trains took at most beyond its tensors: pages it no longer shares, scratch."""

COPIES = 4
"""How often a message exists at the same time: as it came, as tensors, and its reply likewise."""

RETURNED = 1_000_000
"""Memory of at least so many bytes goes back to the system as soon as it is free."""

_SIZE_AND_USE = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the folder of a controller (that of version 2 has none): its files, and what of its use is
cache that the system gives back when asked."""

_UNLIMITED = 2**60
"""Version 1 writes a number near 2**63 for no limit."""


def process_bytes(process: int | str = "self") -> int | None:
    """Return the bytes of a process, shared pages by halves (PSS); None if the system cannot tell.

    Args:
        process: Its number.
    """
    try:
        rows = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    found = [int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:")]
    return found[0] if found else None


def kill_me_first() -> None:
    """Ask the system to kill this process before its parent, should memory run out."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return


def give_back_at_once() -> None:
    """Give memory of tensors back as soon as they are freed, at the price of asking for it again.

    Otherwise the allocator keeps it in pieces: half as much again as the tensors ever took.
    """
    threshold = -3  # M_MMAP_THRESHOLD of glibc; other libraries have no such call, or ignore it.
    try:
        ctypes.CDLL(None).mallopt(threshold, RETURNED)
    except (AttributeError, OSError):
        return


def give_back() -> None:
    """Return what was freed to the system, also the small pieces that lie between others."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def room(root: Path = Path("/")) -> int:
    """Return the bytes that tensors of a step may take here: what is left, but for the reserve."""
    return available(root) - RESERVE


def available(root: Path = Path("/")) -> int:
    """Return the bytes that this machine, or the containers around this process, have left."""
    left = [limit - used for limit, used in _limits(root)]
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        rows = (line.split() for line in meminfo.read_text().splitlines())
        left += [int(row[1]) * 1024 for row in rows if row and row[0] == "MemAvailable:"]
    else:
        left.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(left)


def limit(root: Path = Path("/")) -> int | None:
    """Return the least that a container around this process may take in all; None: no limit."""
    return min((most for most, _ in _limits(root)), default=None)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of each memory cgroup around this process that has a limit."""
    try:
        rows = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        rows = []
    parts = [row.split(":", 2) for row in rows]
    own = {name: path for _, names, path in parts for name in names.split(",")}
    for controller, (most, current, cache) in _SIZE_AND_USE.items():
        home = root / "sys/fs/cgroup" / controller
        # A container may see its own group at the top, whatever the system calls it.
        inner = home / own.get(controller, "").lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(home):
                break
            try:
                bound, used = (int((folder / name).read_text()) for name in (most, current))
                stat = dict(
                    row.split() for row in (folder / "memory.stat").read_text().splitlines()
                )
            except (OSError, ValueError):
                continue  # No such group here, or one without a limit, which reads "max".
            if bound < _UNLIMITED:
                yield bound, used - int(stat.get(cache, 0))
