"""From the splits of a Hugging Face data set to uint8 tensors, a thousand images at a time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sizewise.common import rng
from sizewise.data.dataset import Dataset
from sizewise.errors import DataError

TEST_SPLITS = ("test", "validation", "valid", "val", "validation_matched")
LABEL_COLUMNS = ("label", "labels", "fine_label", "character")
GROUP_COLUMNS = ("writer_id", "client_id", "user_id")
GREY_MODES = ("1", "L", "LA")
BATCH = 1000


class Split(Protocol):
    """The part of ``datasets.Dataset`` and ``datasets.IterableDataset`` that is used here."""

    features: Mapping[str, Any] | None

    def select_columns(self, column_names: list[str]) -> "Split":
        """Keep only these columns."""

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        """Yield batches, each a list per column."""


class Columns(NamedTuple):
    """Which columns hold what; ``names`` is empty when the labels are plain integers."""

    image: str
    label: str
    group: str | None
    names: tuple[str, ...]


class Part(NamedTuple):
    """One split in memory: images (N, C, H, W), labels (N,), group ids (N,) or none."""

    images: Tensor
    labels: Tensor
    groups: list[Any]


def decode(
    name: str, splits: Mapping[str, Split], image_size: int | None, holdout: float = 0.0
) -> Dataset:
    """Read an image data set into memory: of its splits, "train" and one of ``TEST_SPLITS``.

    Without an ``image_size``, the side that images are brought to, all must have the same size. See
    ``Source`` for ``holdout``.
    """
    if "train" not in splits:
        raise DataError(f"{name} has no train split, only {sorted(splits)}; use another data set")
    test_split = next((split for split in TEST_SPLITS if split in splits), None)
    if test_split is None and not holdout:
        raise DataError(
            f"{name} has no test split (expected one of {', '.join(TEST_SPLITS)}), only "
            f"{sorted(splits)}; add test-*.parquet to its folder or use another data set"
        )
    columns = find_columns(name, splits["train"].features)
    train = _read(name, splits["train"], columns, image_size)
    if test_split is None:
        train, test = _hold_out(train, holdout)
    else:
        test = _read(name, splits[test_split], columns, image_size)

    channels = max(train.images.shape[1], test.images.shape[1])
    train_inputs, test_inputs = (_in_channels(p.images, channels) for p in (train, test))
    mean, std = channel_statistics(train_inputs)
    groups = np.unique(train.groups, return_inverse=True)[1] if train.groups else None
    return Dataset(
        name=name,
        train_inputs=train_inputs,
        train_labels=train.labels,
        test_inputs=test_inputs,
        test_labels=test.labels,
        class_names=columns.names or tuple(map(str, range(int(train.labels.max()) + 1))),
        mean=mean,
        std=std,
        groups=None if groups is None else torch.from_numpy(groups.astype(np.int64)),
    )


def find_columns(name: str, features: Mapping[str, Any] | None) -> Columns:
    """Tell the image, label and group columns by their type, and by name where several would do."""
    import datasets  # A second of import time that reading the cache does not need.

    features = features or {}
    images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
    labels = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    labels = labels or [
        key for key in LABEL_COLUMNS if "int" in str(getattr(features.get(key), "dtype", ""))
    ]
    for what, found in (
        ("image column (a feature of type Image) and no texts", images),
        ("label column (a feature of type ClassLabel)", labels),
    ):
        if not found:
            raise DataError(
                f"{name} has no {what}, only {dict(features)}; save it with these features or use "
                "another data set"
            )
    label = next((key for key in LABEL_COLUMNS if key in labels), labels[0])
    group = next((key for key in GROUP_COLUMNS if key in features), None)
    return Columns(images[0], label, group, tuple(getattr(features[label], "names", ())))


def resize(images: Tensor, size: int) -> Tensor:
    """Return square images, from uint8 (N, C, H, W) to (N, C, size, size).

    They are block averages when shrinking by a whole factor, else bilinear.
    """
    height, width = images.shape[2:]
    if (height, width) == (size, size):
        return images
    if height % size == 0 and width % size == 0:
        scaled = F.avg_pool2d(images.float(), (height // size, width // size))
    else:
        scaled = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
    return scaled.round_().clamp_(0, 255).to(torch.uint8).contiguous()


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation of each channel of uint8 (N, C, H, W), where white is 1.

    Counting the 256 values is exact and needs no float copy of the images.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float(share @ values)
        means.append(mean)
        # A constant channel has no deviation to divide by.
        deviations.append(float(share @ (values - mean) ** 2) ** 0.5 or 1.0)
    return tuple(means), tuple(deviations)


def _read(name: str, split: Split, columns: Columns, image_size: int | None) -> Part:
    parts: list[Tensor] = []
    labels: list[int] = []
    groups: list[Any] = []
    wanted = [key for key in columns[:3] if key is not None]
    for batch in split.select_columns(wanted).iter(batch_size=BATCH):
        parts.extend(_pixels(name, batch[columns.image], image_size))
        labels.extend(batch[columns.label])
        groups.extend(batch[columns.group] if columns.group else ())
        sizes = {tuple(part.shape[2:]) for part in parts}
        if len(sizes) > 1:
            raise DataError(
                f"{name} has images of different sizes, such as {sorted(sizes)[:2]}; "
                "set data.image_size to bring them to one"
            )
    if not parts:
        raise DataError(f"{name} has a split without samples; use another data set")
    channels = max(part.shape[1] for part in parts)
    images = torch.cat([_in_channels(part, channels) for part in parts])
    return Part(images, torch.tensor(labels), groups)


def _pixels(name: str, pictures: Sequence[Image.Image], image_size: int | None) -> Iterable[Tensor]:
    """Yield uint8 (n, C, H, W) for each run of pictures of one size."""
    for picture in pictures:
        if picture.mode[0] in "IF":
            raise DataError(
                f"{name} has images of more than 8 bits (mode {picture.mode}), which would be "
                "cut off at 255; store them as 8-bit images"
            )
    # One coloured picture makes its batch coloured: photo collections hold some grey ones.
    mode = "L" if all(picture.mode in GREY_MODES for picture in pictures) else "RGB"
    for (width, height), run in groupby(pictures, key=lambda picture: picture.size):
        rows = np.stack([np.asarray(picture.convert(mode)) for picture in run])
        pixels = torch.from_numpy(rows).view(len(rows), height, width, -1)
        pixels = pixels.permute(0, 3, 1, 2).contiguous()
        yield pixels if image_size is None else resize(pixels, image_size)


def _in_channels(images: Tensor, channels: int) -> Tensor:
    return images.expand(-1, channels, -1, -1).contiguous()


def _hold_out(part: Part, share: float) -> tuple[Part, Part]:
    """Divide a split in two: (the rest, about ``share`` of it), both in their old order."""
    total = len(part.labels)
    chosen = torch.zeros(total, dtype=torch.bool)
    order = torch.randperm(total, generator=rng.torch_generator(0, "hold-out"))
    chosen[order[: round(total * share)]] = True
    groups = [group for group, out in zip(part.groups, chosen.tolist(), strict=False) if not out]
    return (
        Part(part.images[~chosen], part.labels[~chosen], groups),
        Part(part.images[chosen], part.labels[chosen], []),
    )
