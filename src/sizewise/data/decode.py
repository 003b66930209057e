"""Pictures, from files or in memory, as uint8 tensors."""

from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sizewise.errors import DataError

GREY_MODES = ("1", "L", "LA")


def pixels(where: str, pictures: Sequence[Image.Image], image_size: int | None) -> Iterable[Tensor]:
    """Yield uint8 (n, C, H, W) for each run of pictures of one size.

    Args:
        where: What an error begins with.
        pictures: Some pictures.
        image_size: The side that they are brought to; None: they stay as they are.
    """
    for picture in pictures:
        if picture.mode[0] in "IF":
            raise DataError(
                f"{where} has images of more than 8 bits (mode {picture.mode}), which would be "
                "cut off at 255; store them as 8-bit images"
            )
    # One coloured picture makes its batch coloured: photo collections hold some grey ones.
    mode = "L" if all(picture.mode in GREY_MODES for picture in pictures) else "RGB"
    for (width, height), run in groupby(pictures, key=lambda picture: picture.size):
        rows = np.stack([np.asarray(picture.convert(mode)) for picture in run])
        images = torch.from_numpy(rows).view(len(rows), height, width, -1)
        images = images.permute(0, 3, 1, 2).contiguous()
        yield images if image_size is None else resize(images, image_size)


def pictures(
    where: str, cells: Iterable[Any], folder: Path | None = None, first: int = 0
) -> Iterator[Image.Image]:
    """Yield the pictures in the cells of a column.

    Args:
        where: What an error begins with.
        cells: Each is a picture, the bytes of a file, a dict with these, or a path.
        folder: Where paths begin that are not absolute; None: where the program was started.
        first: The number of the first row, for errors.
    """
    for number, cell in enumerate(cells, first + 1):
        if isinstance(cell, Image.Image):
            yield cell
            continue
        if isinstance(cell, dict):
            cell = cell.get("bytes") or cell.get("path")
        if not isinstance(cell, str | bytes | Path):
            raise DataError(
                f"{where}: row {number} holds {type(cell).__name__} in place of an image; "
                "fill it in, or drop the row"
            )
        source = BytesIO(cell) if isinstance(cell, bytes) else Path(folder or ".", cell)
        shown = "" if isinstance(source, BytesIO) else f" {str(source)!r}"
        try:
            with Image.open(source) as opened:
                opened.load()
                yield opened
        except FileNotFoundError:
            raise DataError(f"{where}: there is no image{shown}; correct its path") from None
        except OSError as error:
            raise DataError(f"{where}: the image{shown} cannot be read ({error})") from None


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


def float_statistics(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation of each channel or feature of float32 (N, C, ...)."""
    means, deviations = [], []
    for channel in inputs.unbind(1):
        deviation, mean = torch.std_mean(channel.double(), correction=0)
        means.append(float(mean))
        deviations.append(float(deviation) or 1.0)
    return tuple(means), tuple(deviations)
