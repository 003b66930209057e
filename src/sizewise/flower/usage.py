"""What a process takes, as the system counts it; and who is killed first if there is too little."""

from pathlib import Path


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
