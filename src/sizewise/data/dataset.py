"""A labelled image data set in memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sizewise.errors import DataError
from sizewise.state import sha256


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test images as bytes, with what is needed to normalise and to divide them.

    Attributes:
        name: What it was loaded as.
        train_images: uint8, (N, C, H, W), contiguous.
        train_labels: int64, (N,).
        test_images: uint8, (M, C, H, W), contiguous.
        test_labels: int64, (M,).
        class_names: One name per class.
        mean: One value per channel, in units where white is 1.
        std: One value per channel, in the same units.
        groups: int64, (N,): who wrote each training sample, where the source knows.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        for part, images, labels in (
            ("train", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            # Channels-last images crash some CPU builds of torch in a convolution's backward pass,
            # and a permuted tensor stays channels-last through every later operation.
            if images.dtype != torch.uint8 or images.ndim != 4 or not images.is_contiguous():
                raise DataError(
                    f"{self.name}: {part} images must be contiguous uint8 (N, C, H, W), got "
                    f"{images.dtype} {tuple(images.shape)}; convert them before building a Dataset"
                )
            if len(images) == 0 or labels.shape != (len(images),) or labels.dtype != torch.int64:
                raise DataError(
                    f"{self.name}: expected one int64 label for each of the {len(images)} {part} "
                    f"images (at least one), got {labels.dtype} {tuple(labels.shape)}; "
                    "check the label column"
                )
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.classes:
                raise DataError(
                    f"{self.name}: {part} labels must lie in 0..{self.classes - 1}, got "
                    f"{low}..{high}; use a split whose labels are public"
                )
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(
                f"{self.name}: training images are {tuple(self.train_images.shape[1:])}, test "
                f"images {tuple(self.test_images.shape[1:])}; set image_size to make them equal"
            )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """One image's (C, H, W)."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    def fingerprint(self) -> str:
        """Return a hash of all labels and of a thousand images or so, to tell data sets apart."""
        stride = max(1, len(self.train_labels) // 1000)
        return sha256(
            {
                "train_images": self.train_images[::stride],
                "train_labels": self.train_labels,
                "test_images": self.test_images[::stride],
                "test_labels": self.test_labels,
            }
        )
