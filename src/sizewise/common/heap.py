"""What becomes of memory that tensors give back."""

import ctypes

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**25
"""Bytes of one tensor up to which glibc lets a process keep its memory."""


def keep_freed() -> None:
    """Let this process keep freed memory for its next tensors; for processes that only compute.

    glibc gives it back to the system and asks for it again in every step, which takes up to a fifth
    of a small step's time. The most that a process holds stays what it was. Other C libraries have
    no such switch, and are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, 2**30)
