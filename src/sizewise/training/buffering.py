"""Buffers: what a frozen part of a model makes of a device's data, computed once.

While a device trains later blocks, the earlier ones do not change. If its images and batches do not
change either, neither does what the later blocks see, and it can be kept: in memory as far as the
device has room, else in a file. Batches have a fixed composition because norms may look at the
whole batch; only their order is shuffled from epoch to epoch.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sizewise.memory.prediction import Meter
from sizewise.torch_tools.placement import device_of
from sizewise.training.loop import Shard


@dataclass(frozen=True)
class Buffer:
    """A device's data in fixed batches.

    Attributes:
        inputs: All inputs (N, ...), batch after batch.
        labels: Their labels (N, ...).
        bounds: First and last + 1 row of each batch.
        folder: Where large buffers have their files.
        in_memory: Whether the inputs are in memory.
    """

    inputs: Tensor
    labels: Tensor
    bounds: tuple[tuple[int, int], ...]
    folder: Path
    in_memory: bool

    @property
    def held(self) -> Sequence[Tensor]:
        """The inputs, if they are in memory."""
        return (self.inputs,) if self.in_memory else ()

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the fixed batches in random order; their size was settled when they were made."""
        for number in torch.randperm(len(self.bounds), generator=generator).tolist():
            start, stop = self.bounds[number]
            # Copies: a view would keep the whole buffer, or file, alive as part of the batch.
            yield self.inputs[start:stop].clone(), self.labels[start:stop].clone()

    @torch.no_grad()
    def through(
        self,
        module: nn.Module,
        function: Callable[[Tensor], Tensor],
        room: float,
        meter: Meter | None = None,
    ) -> "Buffer":
        """Return the buffer of what a part of a model makes of every batch.

        Args:
            module: The model.
            function: The part: from a batch (B, ...) to as many outputs.
            room: Bytes that the outputs may take in memory; if they need more, they go to a file.
            meter: Watches the first batch, and the second beside the outputs, if given.
        """
        outputs: Tensor | None = None
        in_memory, device = False, device_of(module)
        for number, (start, stop) in enumerate(self.bounds):
            batch = self.inputs[start:stop].to(device, copy=True)
            with meter if meter is not None and number < 2 else nullcontext() as watching:
                if watching is not None:
                    watching.track(module, batch, self.held)
                    if outputs is not None and in_memory:
                        watching.track(outputs)
                result = function(batch)
            if outputs is None:
                shape = (len(self), *result.shape[1:])
                outputs, in_memory = allocate(shape, result.dtype, room, self.folder)
            outputs[start:stop] = result
        return self if outputs is None else replace(self, inputs=outputs, in_memory=in_memory)


def fixed(
    shard: Shard,
    batch: int,
    generator: torch.Generator,
    room: float,
    folder: Path,
    *,
    drop_last: bool = False,
) -> Buffer:
    """Return a device's images, augmented and divided into batches for good.

    If they need more bytes than there is room in memory, they go to a file in the folder. The
    generator shuffles and augments; `drop_last` leaves out a last batch that is smaller.
    """
    inputs: Tensor | None = None
    in_memory, end = False, 0
    labels, bounds = [], []
    for images, classes in shard.batches(batch, generator, drop_last=drop_last):
        if inputs is None:
            shape = (len(shard), *images.shape[1:])
            inputs, in_memory = allocate(shape, images.dtype, room, folder)
        inputs[end : end + len(classes)] = images
        bounds.append((end, end + len(classes)))
        labels.append(classes)
        end += len(classes)
    if inputs is None:
        return Buffer(torch.empty(0), torch.empty(0, dtype=torch.int64), (), folder, True)
    return Buffer(inputs[:end], torch.cat(labels), tuple(bounds), folder, in_memory)


def allocate(
    shape: tuple[int, ...], kind: torch.dtype, room: float, folder: Path
) -> tuple[Tensor, bool]:
    """Return an empty tensor in memory if there is room for it, else in a new file; and which."""
    count = math.prod(shape)
    if count * kind.itemsize <= room:
        return torch.empty(shape, dtype=kind), True
    # The mapping outlives the file's name, so nothing is left behind, however this process ends.
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, count * kind.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=kind).view(shape), False
