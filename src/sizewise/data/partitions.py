"""Which device holds which training samples."""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sizewise.common import rng
from sizewise.common.structure import nearest
from sizewise.data.catalog import OTHER_NAMES, PARTITIONS
from sizewise.data.schemes import SCHEMES, UNUSED, Request
from sizewise.errors import ConfigError, DataError

SHOWN_DEVICES = 1000


class Shards(ABC):
    """What the rest of the library knows of a partition: a number of devices, a shard for each."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of devices."""

    @abstractmethod
    def shard(self, device: int) -> Tensor:
        """Return the indices of a device's samples, int64 (n,)."""

    @abstractmethod
    def sizes(self) -> Tensor:
        """Return how many samples each device has, int64 (devices,)."""

    def histogram(self, labels: Tensor, classes: int, first: int | None = None) -> Tensor:
        """Return how many samples of each class a device has, int64 (devices, classes).

        The labels are int64 (N,); only as many devices as ``first`` says are looked at, or all.
        """
        devices = len(self) if first is None else min(first, len(self))
        shards = map(self.shard, range(devices))
        return torch.stack([torch.bincount(labels[own], minlength=classes) for own in shards])

    def _check(self, device: int) -> None:
        if not 0 <= device < len(self):
            raise IndexError(f"there is no device {device}: the partition has 0..{len(self) - 1}")


@dataclass(frozen=True, eq=False)
class Partition(Shards):
    """Disjoint shards, all in one array.

    Attributes:
        order: int64, (samples in use,): sample indices, device by device.
        offsets: int64, (devices + 1,): device k holds ``order[offsets[k]:offsets[k + 1]]``.
    """

    order: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def shard(self, device: int) -> Tensor:
        """Return the indices of a device's samples, a view into ``order``."""
        self._check(device)
        start, end = self.offsets[device : device + 2].tolist()
        return self.order[start:end]

    def sizes(self) -> Tensor:
        """Return how many samples each device has, int64 (devices,)."""
        return self.offsets.diff()


@dataclass(frozen=True)
class Draw(Shards):
    """Shards drawn from one pool when asked for; they overlap, and a million of them cost nothing.

    The pool has so many samples, of which each device draws different ones, by the run's seed.
    """

    pool: int
    devices: int
    samples_per_device: int
    seed: int

    def __len__(self) -> int:
        return self.devices

    def shard(self, device: int) -> Tensor:
        """Return the indices of a device's samples, the same ones every time."""
        self._check(device)
        generator = rng.numpy_generator(self.seed, "partition", "draw", device)
        return torch.from_numpy(generator.choice(self.pool, self.samples_per_device, replace=False))

    def sizes(self) -> Tensor:
        """Return how many samples each device has, int64 (devices,)."""
        return torch.tensor(self.samples_per_device).expand(self.devices)


def make(
    name: str,
    labels: Tensor,
    classes: int,
    devices: int,
    seed: int,
    *,
    alpha: float = 0.3,
    classes_per_device: int = 2,
    min_samples: int = 10,
    samples_per_device: int = 100,
    groups: Tensor | None = None,
) -> Shards:
    """Divide a training set among devices; a pure function of its arguments.

    The name is one of ``PARTITIONS``, and ``samples_per_device`` is for ``draw``; all else is
    described at ``Request``, where labels and groups are arrays.

    Raises:
        ConfigError: If a name or an option cannot be used.
        DataError: If the samples cannot be divided like this.
    """
    if name not in PARTITIONS:
        raise ConfigError(
            f"unknown partition '{name}'; {nearest(name, PARTITIONS)} "
            "(papers that say Dir(alpha) most often mean 'dirichlet', with data.alpha)"
        )
    name = OTHER_NAMES.get(name, name)
    if len(labels) == 0 or int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise DataError(f"expected labels in 0..{classes - 1}, at least one; check the data set")
    if devices < 1:
        raise ConfigError(f"fleet.devices must be at least 1, got {devices}")
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"data.alpha must be a number above 0, got {alpha}")
    if not 1 <= classes_per_device <= classes and name in ("shards", "deck"):
        raise ConfigError(
            f"data.classes_per_device must lie in 1..{classes}, got {classes_per_device}"
        )
    if name == "draw":
        if not 1 <= samples_per_device <= len(labels):
            raise ConfigError(
                f"data.samples_per_device must lie in 1..{len(labels)}, the number of training "
                f"samples, got {samples_per_device}"
            )
        return Draw(len(labels), devices, samples_per_device, seed)
    if devices > len(labels):
        raise DataError(
            f"{devices} devices cannot share {len(labels)} samples; "
            "lower fleet.devices, or set data.partition to draw"
        )
    request = Request(
        labels.numpy(),
        classes,
        devices,
        alpha,
        classes_per_device,
        max(min_samples, 1),
        None if groups is None else groups.numpy(),
    )
    owner = SCHEMES[name](request, rng.numpy_generator(seed, "partition", name))
    sizes = np.bincount(owner[owner != UNUSED], minlength=devices)
    if sizes.min() == 0:
        raise DataError(
            f"{name} leaves {np.count_nonzero(sizes == 0)} of {devices} devices without samples; "
            "lower fleet.devices or choose another data.partition"
        )
    # A stable sort lists the samples of a device in the order of the data set, UNUSED (-1) first.
    order = np.argsort(owner, kind="stable")[len(owner) - sizes.sum() :]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Partition(torch.from_numpy(order), torch.from_numpy(offsets))


def summary(partition: Shards, labels: Tensor, classes: int) -> dict[str, object]:
    """Return what a report shows of a partition, as plain JSON values."""
    sizes = partition.sizes()
    return {
        "devices": len(partition),
        "samples": {
            "min": int(sizes.min()),
            "mean": float(sizes.double().mean()),
            "max": int(sizes.max()),
            "total": int(sizes.sum()),
        },
        "histogram": partition.histogram(labels, classes, first=SHOWN_DEVICES).tolist(),
    }


def save(partition: Shards, path: str | Path) -> None:
    """Write a partition as safetensors; of a ``Draw`` only its description."""
    if isinstance(partition, Draw):
        save_file({}, path, metadata={"draw": json.dumps(asdict(partition))})
    elif isinstance(partition, Partition):
        save_file({"order": partition.order, "offsets": partition.offsets}, path)
    else:
        raise TypeError(f"expected a Partition or a Draw, got {type(partition).__name__}")


def load_partition(path: str | Path) -> Shards:
    """Read a partition that ``save`` wrote."""
    try:
        with safe_open(path, "pt") as file:
            draw = (file.metadata() or {}).get("draw")
            if draw is not None:
                return Draw(**json.loads(draw))
            order, offsets = file.get_tensor("order"), file.get_tensor("offsets")
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not a saved partition ({error}); make it again with partitions.make"
        ) from None
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(order) or bool((offsets.diff() < 0).any()):
        raise DataError(f"{path} has offsets that do not fit its samples; make the partition again")
    return Partition(order, offsets)
