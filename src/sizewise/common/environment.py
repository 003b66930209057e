"""Where a run happened: versions and machine, for its report."""

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version

import torch

import sizewise

SAME_BITS = (
    "any number of workers, resumes and engines, with these versions on this kind of CPU; "
    "other instructions round differently"
)
"""What a repetition of a run must share with it to end with the same `state_sha256`."""

_ROUNDING = ("torch", "numpy", "machine", "cpu", "cpu_limits")
"""The facts on which the last bits of a result depend."""


def environment() -> dict[str, str]:
    """Return versions, machine and time, as plain text."""
    packages = ("torch", "numpy", "safetensors", "datasets")
    return {
        "sizewise": sizewise.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_limits": " ".join(
            f"{name}={os.environ[name]}"
            for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
            if name in os.environ
        ),
        "same_bits": SAME_BITS,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def drift(recorded: Mapping[str, str]) -> str | None:
    """Return why a run may end with other bits than where it was recorded; None if it will not."""
    now = environment()
    changed = [
        f"{name} was {recorded[name] or 'not set'} and is {now[name] or 'not set'}"
        for name in _ROUNDING
        if name in recorded and recorded[name] != now[name]
    ]
    if not changed:
        return None
    return f"this run will not end with the bits of an uninterrupted one: {'; '.join(changed)}"
