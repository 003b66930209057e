"""Where a run happened: versions and machine, for its report."""

import os
import platform
import time
from importlib.metadata import version

import sizewise


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
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
