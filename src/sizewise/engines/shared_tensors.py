"""Named tensors in memory that several processes share.

An arena is an anonymous file, in memory where the system has a place for that. Its descriptor is
inherited by worker processes, and the layout (names, types, shapes, offsets) travels as JSON. It
has no name, so nothing is left behind when a process is killed.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sizewise.errors import EngineError

Layout = dict[str, tuple[str, list[int], int]]
"""By tensor name: type, shape, offset in bytes."""

_ALIGNMENT = 64
TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class SharedTensors:
    """A shared file of tensors: one process writes, then others read."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Open an inherited arena by its descriptor, or make a new one."""
        if descriptor is None:
            memory = Path("/dev/shm")  # noqa: S108  (unnamed: the file has no path to guess)
            folder = memory if memory.is_dir() else None
            with tempfile.TemporaryFile(dir=folder) as file:
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    def write(self, tensors: Mapping[str, Tensor]) -> Layout:
        """Copy tensors into the arena, over whatever it held, and return where they are."""
        layout: Layout = {}
        end = 0
        for name, tensor in tensors.items():
            kind = str(tensor.dtype).removeprefix("torch.")
            layout[name] = (kind, list(tensor.shape), end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if os.fstat(self.descriptor).st_size < end:
            try:
                # Reserved now: a write beyond what the system has would kill the process later.
                os.posix_fallocate(self.descriptor, 0, end)
            except OSError as error:
                raise EngineError(
                    f"{end:,} bytes of shared memory are not to be had ({error.strerror}); "
                    f"enlarge /dev/shm, or set engine.workers to 1"
                ) from None
        for name, place in self.read(layout).items():
            place.copy_(tensors[name])
        return layout

    def read(self, layout: Mapping[str, tuple[str, list[int], int]]) -> dict[str, Tensor]:
        """Return tensors that live in the arena; they change when it is written again."""
        size = os.fstat(self.descriptor).st_size
        if size and (self._map is None or len(self._map) < size):
            # An older, shorter map lives on for as long as tensors in it do.
            self._map = mmap.mmap(self.descriptor, size)
        return {name: self._tensor(*place) for name, place in layout.items()}

    def _tensor(self, kind: str, shape: list[int], offset: int) -> Tensor:
        count = math.prod(shape)
        if count == 0 or self._map is None:
            return torch.empty(shape, dtype=TYPES[kind])
        flat = torch.frombuffer(self._map, dtype=TYPES[kind], count=count, offset=offset)
        return flat.reshape(shape)

    def close(self) -> None:
        """Close the file; its memory is freed when the last process lets go of it."""
        os.close(self.descriptor)
