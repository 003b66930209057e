"""A second device for tests: `torch.device("secondary")`, built where a C++ compiler is present.

Its memory is counted, its kernels are the CPU's (`device.cpp`). So what trains on it must end with
the CPU's bits, and a tensor that somebody forgot to move is an error. It takes about ten seconds to
build, once for each version of the source and of torch.
"""

import fcntl
import gc
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from ctypes import CDLL, c_int64
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("device.cpp")
# torch gives every module a method of this name, which hides attributes that models call so.
NAME, COUNT = "secondary", 2

# What `import torch` looks for: it then loads the device by itself, also in worker processes.
ENTRY_POINT = f"[torch.backends]\n{NAME} = second_device:load\n"


def home() -> Path:
    """Return the folder of this version of the device."""
    what = SOURCE.read_bytes() + f"{ENTRY_POINT}{torch.__version__}".encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sizewise-second-device" / hashlib.sha256(what).hexdigest()[:16]


def library() -> Path:
    """Build the device, if nobody has yet, and return its library."""
    folder, compiler = home(), shutil.which("g++")
    built = folder / "device.so"
    if not built.exists() and compiler is None:
        pytest.skip("the second device needs g++ to be built", allow_module_level=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another process may be building it.
        if not built.exists():
            _build(str(compiler), built)
    return built


def _build(compiler: str, built: Path) -> None:
    start, draft = time.perf_counter(), built.with_suffix(".tmp")
    places = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    places += [f"-L{path}" for path in cpp_extension.library_paths()]
    command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", str(SOURCE), *places]
    subprocess.run([*command, "-ltorch_cpu", "-lc10", "-o", str(draft)], check=True)
    facts = built.with_name("second_device-0.dist-info")
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: second-device\nVersion: 0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINT)
    draft.rename(built)
    print(f"built the second device in {time.perf_counter() - start:.0f} s", file=sys.stderr)


def load() -> None:
    """Make the device known to torch, in this process."""
    if hasattr(torch, NAME):
        return
    # Autograd starts a thread for each device that it knows of at its first use, and a process that
    # has one may abort when it ends. So it is used now, and goes backward in the calling thread.
    torch.zeros((), requires_grad=True).square().backward()
    torch.autograd.set_multithreading_enabled(False)
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: COUNT,
        current_device=lambda: torch.accelerator.current_device_index(),
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        # What is drawn comes from the CPU's generator.
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device: None,
        set_rng_state=lambda state, device: None,
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()


def set_limit(size: int, device: int = 0) -> None:
    """Let a device have so many bytes in this process; 0 is no limit."""
    CDLL(str(library())).set_limit(c_int64(device), c_int64(size))


def environment(ledger: Path | None = None) -> dict[str, str]:
    """Return what a process needs to find the device.

    Args:
        ledger: A file in which all these processes count together; see `counts`.
    """
    library()
    path = os.pathsep.join([str(home()), str(SOURCE.parents[1]), os.environ.get("PYTHONPATH", "")])
    shared = {} if ledger is None else {"SECOND_DEVICE_LEDGER": str(ledger)}
    return {"PYTHONPATH": path.rstrip(os.pathsep), **shared}


def counts(ledger: Path, device: int = 0) -> Mapping[str, int]:
    """Return what processes counted together: bytes that are live, their peak, and the limit."""
    found = struct.unpack_from("3q", ledger.read_bytes(), 24 * device)
    return dict(zip(("live", "peak", "limit"), found, strict=True))


def start_counting(ledger: Path, limit: int = 0) -> None:
    """Write a file to count in, for devices of so many bytes each."""
    gc.collect()  # What an earlier run left in this process must not be given back later.
    ledger.write_bytes(struct.pack("3q", 0, 0, limit) * COUNT)
