"""A labelled data set in memory: images, vectors, or texts as token ids."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor

from sizewise.data.augment import Transform, augment_once
from sizewise.errors import ConfigError, DataError
from sizewise.exchange.state import sha256
from sizewise.steps.metrics import METRICS
from sizewise.steps.step import IGNORED

Target = Literal["class", "tags", "score", "next"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples, with what is needed to normalise and to divide them.

    Attributes:
        name: What it was loaded as.
        train_inputs: Images, uint8 or float32 (N, C, H, W), contiguous; vectors, float32 (N, F); of
            texts the token ids, int64 (N, T).
        train_labels: Classes, int64 (N,); tags or next tokens, int64 (N, T), `IGNORED` where there
            is none; or scores, float32 (N,).
        test_inputs: As train_inputs, M of them.
        test_labels: As train_labels, M of them.
        class_names: One name per class or tag; for scores and tokens, one name.
        mean: One value per channel, in units where white is 1; of floats per channel or feature.
            None for texts, and for floats that are taken as they are.
        std: One value per channel, in the same units.
        groups: int64, (N,): who wrote each training sample, where the source knows.
        vocabulary: How many token ids there are; 0: the samples are images.
        target: What a model has to find: a class, a tag for each token, a score, or the next token
            after each.
        metric: How models are measured; see `metrics`.
        silos: Names of the data sets that it was joined from, each with classes of its own; see
            `silos`.
        tokenizer: What made the token ids of texts, as JSON.
        divided: The groups are the devices: the partition is `natural` unless somebody says else.
        notes: What a run should say of its data, such as that a share was held out for tests.
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    groups: Tensor | None = None
    vocabulary: int = 0
    target: Target = "class"
    metric: str = "accuracy"
    silos: tuple[str, ...] = ()
    tokenizer: str = ""
    divided: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.metric not in METRICS[self.target]:
            raise ConfigError(
                f"the metric of {self.name} is one of {', '.join(METRICS[self.target])}, not "
                f"{self.metric!r}; correct or remove data.metric"
            )
        for part, images, labels in (
            ("train", self.train_inputs, self.train_labels),
            ("test", self.test_inputs, self.test_labels),
        ):
            if self.vocabulary:
                self._check_tokens(part, images)
                if self.target != "class":
                    self._check_targets(part, images, labels)
                    continue
            else:
                self._check_images(part, images)
            if len(images) == 0 or labels.shape != (len(images),) or labels.dtype != torch.int64:
                raise DataError(
                    f"{self.name}: expected one int64 label for each of the {len(images)} {part} "
                    f"samples (at least one), got {labels.dtype} {tuple(labels.shape)}; "
                    "check the label column"
                )
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.classes:
                raise DataError(
                    f"{self.name}: {part} labels must lie in 0..{self.classes - 1}, got "
                    f"{low}..{high}; use a split whose labels are public"
                )
        if self.train_inputs.shape[1:] != self.test_inputs.shape[1:]:
            raise DataError(
                f"{self.name}: training images are {tuple(self.train_inputs.shape[1:])}, test "
                f"images {tuple(self.test_inputs.shape[1:])}; set image_size to make them equal"
            )

    def _check_images(self, part: str, images: Tensor) -> None:
        # Channels-last images crash some CPU builds of torch in a convolution's backward pass,
        # and a permuted tensor stays channels-last through every later operation.
        known = {torch.uint8: (4,), torch.float32: (2, 4)}
        if images.ndim not in known.get(images.dtype, ()) or not images.is_contiguous():
            raise DataError(
                f"{self.name}: {part} images must be contiguous uint8 or float32 (N, C, H, W), or "
                f"vectors float32 (N, F), got {images.dtype} {tuple(images.shape)}; convert them "
                "before building a Dataset"
            )

    def _check_tokens(self, part: str, ids: Tensor) -> None:
        if ids.dtype != torch.int64 or ids.ndim != 2 or len(ids) == 0:
            raise DataError(
                f"{self.name}: {part} texts must be int64 token ids (N, T), got {ids.dtype} "
                f"{tuple(ids.shape)}; pad them to one length before building a Dataset"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            raise DataError(
                f"{self.name}: {part} token ids must lie in 0..{self.vocabulary - 1}, got "
                f"{int(ids.min())}..{int(ids.max())}; give the tokenizer's full vocabulary"
            )

    def _check_targets(self, part: str, ids: Tensor, labels: Tensor) -> None:
        tags = self.target in ("tags", "next")
        kind, shape = (torch.int64, ids.shape) if tags else (torch.float32, ids.shape[:1])
        if labels.dtype != kind or labels.shape != shape:
            raise DataError(
                f"{self.name}: expected {kind} labels {tuple(shape)} for {part} texts whose target "
                f"is {self.target!r}, got {labels.dtype} {tuple(labels.shape)}"
            )
        known = (labels == IGNORED) | ((labels >= 0) & (labels < self.classes))
        if tags and not bool(known.all()):
            raise DataError(
                f"{self.name}: {part} tags must lie in 0..{self.classes - 1}, or be {IGNORED} "
                "where there is none; use a split whose tags are public"
            )

    @property
    def classes(self) -> int:
        """The number of classes, tags or tokens of all label sets; 1 for scores."""
        return self.vocabulary if self.target == "next" else len(self.class_names)

    @property
    def sets(self) -> int:
        """The number of label sets: that of the silos."""
        return max(1, len(self.silos))

    def names(self, number: int) -> tuple[str, ...]:
        """Return the names of one label set's classes."""
        places = self.classes // self.sets
        return self.class_names[number * places : (number + 1) * places]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image, (C, H, W), vector, (F,), or text, (T,)."""
        return tuple(self.train_inputs.shape[1:])

    @property
    def strata(self) -> tuple[Tensor, int]:
        """What partitions go by: int64 (N,), and how many values it has; 1 without classes."""
        if self.target == "class":
            return self.train_labels, self.classes
        return torch.zeros(len(self.train_labels), dtype=torch.int64), 1

    def transform(self, policy: str = "none") -> Callable[[Tensor, Generator | None], Tensor]:
        """Return what turns a batch of samples into what a model takes; images are augmented."""
        if policy != "none" and self.train_inputs.ndim != 4:
            raise ConfigError(
                f"recipe.augment = {policy!r} is for images, and {self.name} holds "
                f"{'texts' if self.vocabulary else 'vectors'}; set it to 'none'"
            )
        if self.vocabulary:
            return as_they_are
        white = 255 if self.train_inputs.dtype == torch.uint8 else 1
        return Transform(policy, self.mean, self.std, white=white)

    def augmented(self, policy: str, generator: Generator) -> "Dataset":
        """Return the same data with every training image augmented, once and for all."""
        transform = self.transform(policy)
        if not isinstance(transform, Transform):
            return self
        return replace(self, train_inputs=augment_once(self.train_inputs, transform, generator))

    def in_classes(self, names: tuple[str, ...]) -> "Dataset":
        """Return the same data with its labels numbered as somebody else numbers them.

        Args:
            names: Their classes or tags, in order. Of data whose classes have numbers for names,
                the numbers count.

        Raises:
            DataError: The data has a class that they do not have.
        """
        own = self.class_names
        numbered = own == tuple(map(str, range(len(own)))) and len(own) <= len(names)
        if numbered or own == names[: len(own)] or self.target in ("score", "next"):
            return replace(self, class_names=names)
        unknown = sorted(set(own) - set(names))
        if unknown:
            raise DataError(
                f"{self.name} has the class {unknown[0]!r}, and the others have "
                f"{', '.join(names[:9])}; label it as they do"
            )
        numbers = torch.tensor([names.index(name) for name in own])
        train, test = (
            torch.where(labels < 0, labels, numbers[labels.clamp(min=0)])
            for labels in (self.train_labels, self.test_labels)
        )
        return replace(self, class_names=names, train_labels=train, test_labels=test)

    def fingerprint(self) -> str:
        """Return a hash of all labels and of a thousand images or so, to tell data sets apart."""
        stride = max(1, len(self.train_labels) // 1000)
        return sha256(
            {
                # The names are part of the hash, and hashes are kept in run folders.
                "train_images": self.train_inputs[::stride],
                "train_labels": self.train_labels,
                "test_images": self.test_inputs[::stride],
                "test_labels": self.test_labels,
            }
        )


def as_they_are(samples: Tensor, generator: Generator | None) -> Tensor:
    """Return a batch of token ids (B, T)."""
    return samples
