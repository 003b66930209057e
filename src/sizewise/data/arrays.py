"""Tensors and arrays as inputs of a model: images of bytes or floats, and vectors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sizewise.errors import DataError

CHANNELS = (1, 2, 3, 4)
"""Numbers of channels by which the layout of images is told: grey, with alpha, colour, both."""


def is_array(value: object) -> bool:
    """Return whether something is a tensor or a numpy array."""
    return isinstance(value, Tensor | np.ndarray)


def tensor(where: str, given: Any) -> Tensor:
    """Return a tensor or an array as a tensor on the CPU; nothing is copied if it need not be."""
    if isinstance(given, Tensor):
        if given.layout != torch.strided or given.is_quantized:
            raise DataError(f"{where}: inputs are dense, and {given.layout} came; call to_dense()")
        return given.detach().cpu()
    if given.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: inputs are numbers, and an array of {given.dtype} came; convert it"
        )
    # Torch would warn that nobody must write into it, and nobody does; but it warns.
    return torch.from_numpy(given if given.flags.writeable else given.copy())


def inputs(where: str, given: Any, first: int = 0) -> Tensor:
    """Return inputs as a `Dataset` holds them.

    Args:
        where: What an error begins with.
        given: Images, (N, C, H, W), (N, H, W, C) or grey (N, H, W), as bytes (uint8, or other whole
            numbers from 0 to 255) or as floats; or vectors, (N, features), as floats.
        first: The number of the first one, for errors.

    Returns:
        uint8 or float32 (N, C, H, W), or float32 (N, features); contiguous.

    Raises:
        DataError: It is something else, or not all of it is finite.
    """
    values = tensor(where, given)
    came = f"{values.dtype} {tuple(values.shape)} came".replace("torch.", "")
    if values.ndim not in (2, 3, 4) or len(values) == 0 or values.numel() == 0:
        raise DataError(
            f"{where}: inputs are images (N, C, H, W), (N, H, W, C) or (N, H, W), or vectors "
            f"(N, features); {came}: reshape them"
        )
    if values.is_complex() or values.dtype == torch.bool:
        raise DataError(f"{where}: inputs are uint8 or floats; {came}: convert them")
    if values.is_floating_point():
        values = values.float()
        _check_finite(where, values, first)
    elif values.ndim == 2:
        if values.dtype != torch.uint8:
            raise DataError(
                f"{where}: whole numbers (N, features) could be features or token ids; {came}: "
                "give features as floats, texts with data.tokenizer, token ids as a Dataset"
            )
        values = values.float()
    elif values.dtype != torch.uint8:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > 255:
            raise DataError(
                f"{where}: images of whole numbers hold bytes, 0 to 255, and {low} to {high} came; "
                "give uint8, or floats"
            )
        values = values.to(torch.uint8)
    if values.ndim == 3:
        values = values.unsqueeze(1)
    elif values.ndim == 4 and values.shape[1] not in CHANNELS and values.shape[3] in CHANNELS:
        values = values.permute(0, 3, 1, 2)
    return values.contiguous()


def _check_finite(where: str, values: Tensor, first: int) -> None:
    """Raise DataError if floats (N, ...) hold something that is no number."""
    # A sum is not finite if one of its terms is not, and needs no second tensor of that size.
    if bool(values.sum(dtype=torch.float64).isfinite()):
        return
    bad = ~values.flatten(1).isfinite()
    row, column = bad.nonzero()[0].tolist()
    raise DataError(
        f"{where}: row {first + row + 1} has {values.flatten(1)[row, column]:g} among its values; "
        "fill in what is no number, or drop such rows"
    )


class Filling:
    """Rows of one tensor that come in parts: one copy of them, if their number is known.

    Images may be grey before or after coloured ones: all become coloured then.
    """

    def __init__(self, where: str, rows: int | None = None) -> None:
        self._where, self._rows = where, rows
        self._buffer: Tensor | None = None
        self._filled = 0

    def add(self, part: Tensor) -> None:
        """Put some rows after those that are there."""
        end = self._filled + len(part)
        buffer = self._buffer
        if buffer is None:
            buffer = part.new_empty((max(self._rows or 0, end), *part.shape[1:]))
        if part.shape[1:] != buffer.shape[1:] or part.dtype != buffer.dtype:
            part, buffer = self._alike(part, buffer)
        if end > len(buffer):
            more = buffer.new_empty((max(end, 2 * len(buffer)), *buffer.shape[1:]))
            more[: self._filled] = buffer[: self._filled]
            buffer = more
        buffer[self._filled : end] = part
        self._buffer, self._filled = buffer, end

    def done(self) -> Tensor:
        """Return all rows, (N, ...)."""
        if self._buffer is None:
            raise DataError(f"{self._where} has no samples; use other data")
        whole = self._buffer[: self._filled]
        return whole if self._filled == len(self._buffer) else whole.clone()

    def _alike(self, part: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        images = part.ndim == buffer.ndim == 4 and part.shape[2:] == buffer.shape[2:]
        if images and part.dtype == buffer.dtype and 1 in (part.shape[1], buffer.shape[1]):
            channels = max(part.shape[1], buffer.shape[1])
            return in_channels(part, channels), in_channels(buffer, channels)
        sizes = sorted({tuple(buffer.shape[1:]), tuple(part.shape[1:])})
        if len(sizes) == 1:
            raise DataError(
                f"{self._where} has samples of {buffer.dtype} and of {part.dtype}; convert them to "
                "one type"
            )
        raise different(self._where, sizes)


def different(where: str, shapes: Any) -> DataError:
    """Return what to say of samples of different shapes."""
    return DataError(
        f"{where} has samples of different sizes, such as {list(shapes)[:2]}; "
        "bring them to one, or images with data.image_size"
    )


def in_channels(images: Tensor, channels: int) -> Tensor:
    """Return images (N, C, H, W) with so many channels, grey ones as equal parts of colour."""
    return images.expand(-1, channels, -1, -1).contiguous()
