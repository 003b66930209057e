"""Which device holds which training samples."""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
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
        """Return the indices of the samples that a device trains on, int64 (n,)."""

    @abstractmethod
    def sizes(self) -> Tensor:
        """Return how many samples each device trains on, int64 (devices,)."""

    @abstractmethod
    def validation(self, device: int) -> Tensor:
        """Return the indices of the samples that a device keeps to validate on, int64 (m,)."""

    @abstractmethod
    def held_out(self) -> Tensor:
        """Return the indices of all samples that nobody trains on, as they validate, int64."""

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
        kept: int64, (devices,): how many of them, its last ones, a device validates on.
    """

    order: Tensor
    offsets: Tensor
    kept: Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def shard(self, device: int) -> Tensor:
        """Return the indices of the samples that a device trains on, a view into ``order``."""
        start, middle, _ = self._places(device)
        return self.order[start:middle]

    def sizes(self) -> Tensor:
        """Return how many samples each device trains on, int64 (devices,)."""
        held = self.offsets.diff()
        return held if self.kept is None else held - self.kept

    def validation(self, device: int) -> Tensor:
        """Return the indices of the samples that a device keeps to validate on, int64 (m,)."""
        _, middle, end = self._places(device)
        return self.order[middle:end]

    def held_out(self) -> Tensor:
        """Return the indices of all samples that nobody trains on, as they validate, int64."""
        held = self.offsets.diff()
        # The place of each sample in its shard, counted from the shard's end.
        ends = self.offsets[1:].repeat_interleave(held) - torch.arange(len(self.order))
        kept = torch.zeros_like(held) if self.kept is None else self.kept
        return self.order[ends <= kept.repeat_interleave(held)]

    def _places(self, device: int) -> tuple[int, int, int]:
        """Return where in ``order`` a device's samples begin, where its last ones, and the end."""
        self._check(device)
        start, end = self.offsets[device : device + 2].tolist()
        return start, end if self.kept is None else end - int(self.kept[device]), end


@dataclass(frozen=True)
class Draw(Shards):
    """Shards drawn from one pool when asked for; they overlap, and a million of them cost nothing.

    The pool has so many samples, of which each device draws different ones, by the run's seed. A
    share of the pool is for validation only: what one device validates on no other trains on.
    """

    pool: int
    devices: int
    samples_per_device: int
    seed: int
    share: float = 0.0

    def __len__(self) -> int:
        return self.devices

    def shard(self, device: int) -> Tensor:
        """Return the indices of the samples that a device trains on, the same ones every time."""
        return self._drawn(device, "draw", self._parts[0], int(self.sizes()[0]))

    def sizes(self) -> Tensor:
        """Return how many samples each device trains on, int64 (devices,)."""
        own = torch.tensor(self.samples_per_device)
        return (own - kept_of(own, self.share)).expand(self.devices)

    def validation(self, device: int) -> Tensor:
        """Return the indices of the samples that a device keeps to validate on, int64 (m,)."""
        count = int(kept_of(torch.tensor(self.samples_per_device), self.share))
        return self._drawn(device, "validation", self._parts[1], count)

    def held_out(self) -> Tensor:
        """Return the indices of all samples that nobody trains on, as they validate, int64."""
        return self._parts[1]

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """The part of the pool that is for training, and the one for validation."""
        count = int(kept_of(torch.tensor(self.pool), self.share))
        if not count:
            return torch.arange(self.pool), torch.arange(0)
        generator = rng.numpy_generator(self.seed, "partition", "validation")
        order = torch.from_numpy(generator.permutation(self.pool))
        return order[count:].sort().values, order[:count].sort().values

    def _drawn(self, device: int, purpose: str, part: Tensor, count: int) -> Tensor:
        self._check(device)
        generator = rng.numpy_generator(self.seed, "partition", purpose, device)
        return part[torch.from_numpy(generator.choice(len(part), count, replace=False))]


def kept_of(samples: Tensor, share: float) -> Tensor:
    """Return how many of so many samples a device validates on, int64.

    It is the nearest whole number, but at least one if there is a share, and never all.
    """
    if not share:
        return torch.zeros_like(samples)
    wanted = (samples.double() * share + 0.5).floor().long().clamp(min=1)
    return torch.minimum(wanted, samples - 1)


def with_validation(partition: Partition, share: float, seed: int) -> Partition:
    """Return a partition whose devices keep a share of their samples, drawn by seed, to validate.

    Both parts of a shard stay in the order they were in.
    """
    sizes = partition.sizes()
    kept = kept_of(sizes, share)
    owner = torch.arange(len(sizes)).repeat_interleave(sizes).numpy()
    keys = rng.numpy_generator(seed, "partition", "validation").random(len(owner))
    # Device by device, each one's samples by their keys: those with the smallest are kept.
    drawn = np.lexsort((keys, owner))
    place = np.arange(len(owner)) - partition.offsets[:-1].numpy()[owner]
    chosen = np.zeros(len(owner), dtype=bool)
    chosen[drawn] = place < kept.numpy()[owner]
    order = np.lexsort((chosen, owner))
    return Partition(partition.order[torch.from_numpy(order)], partition.offsets, kept)


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
    validation: float = 0.0,
    groups: Tensor | None = None,
) -> Shards:
    """Divide a training set among devices; a pure function of its arguments.

    The name is one of ``PARTITIONS``, and ``samples_per_device`` is for ``draw``; ``validation`` is
    the share of its samples on which a device does not train; all else is described at ``Request``,
    where labels and groups are arrays.

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
    if not 0 <= validation < 1:
        raise ConfigError(f"data.validation must be a share from 0 to below 1, not {validation}")
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
        return Draw(len(labels), devices, samples_per_device, seed, validation)
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
    partition = Partition(torch.from_numpy(order), torch.from_numpy(offsets))
    return with_validation(partition, validation, seed) if validation else partition


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
        kept = {} if partition.kept is None else {"kept": partition.kept}
        save_file({"order": partition.order, "offsets": partition.offsets, **kept}, path)
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
            kept = file.get_tensor("kept") if "kept" in file.keys() else None  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not a saved partition ({error}); make it again with partitions.make"
        ) from None
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(order) or bool((offsets.diff() < 0).any()):
        raise DataError(f"{path} has offsets that do not fit its samples; make the partition again")
    return Partition(order, offsets, kept)
