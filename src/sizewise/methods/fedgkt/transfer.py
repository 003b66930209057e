"""Knowledge transfer between small models on devices and a large one on the server.

What each side trains on, and what it minimises (see `methods.fedgkt`). Whatever the sides tell each
other is in the order of a device's samples, so that it can be found whatever batch a sample is in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.training.loop import Shard


@dataclass(frozen=True)
class Pupil(Shard):
    """A device's data, and the server's logits (n, classes), row i for its i-th sample."""

    logits: Tensor | None = None

    @cached_property
    def _numbered(self) -> Shard:
        """The same samples, with their places in the shard as labels."""
        places = torch.zeros(len(self.labels), dtype=torch.int64)
        places[self.rows] = torch.arange(len(self.rows))
        return Shard(self.inputs, places, self.rows, self.transform)

    def batches(
        self, size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield one shuffled pass: a tuple of images and the server's logits, and labels."""
        for images, places in self._numbered.batches(size, generator, drop_last=drop_last):
            taught = () if self.logits is None else (self.logits[places],)
            yield (images, *taught), self.labels[self.rows[places]]


@dataclass(frozen=True)
class Gathered:
    """What devices told the server in a round, and its answers, written while it trains.

    Attributes:
        features: What their stems made of their samples, (N, ...).
        logits: Their guesses, (N, classes).
        labels: (N,).
        chunks: How many samples in turn are shuffled among each other; together N.
    """

    features: Tensor
    logits: Tensor
    labels: Tensor
    chunks: tuple[int, ...]

    held = ()

    @cached_property
    def answers(self) -> Tensor:
        """The server's logits (N, classes); each batch leaves its own here."""
        return torch.zeros_like(self.logits)

    def _note(self, rows: Tensor, logits: Tensor) -> None:
        self.answers.index_copy_(0, rows, logits.to(self.answers))

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self, size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield one shuffled pass in which nobody is left out: every sample needs an answer."""
        for chunk in torch.split(torch.arange(len(self)), list(self.chunks)):
            order = chunk[torch.randperm(len(chunk), generator=generator)]
            # As many batches as fill up, and their sizes equal: none is of a single sample.
            for rows in torch.tensor_split(order, max(1, len(order) // size)):
                answer = partial(self._note, rows)
                yield (self.features[rows], self.logits[rows], answer), self.labels[rows]


def distance(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL of a student's softened guesses from a teacher's, both (B, classes)."""
    guesses = (logits / temperature).log_softmax(1)
    truth = (teacher / temperature).softmax(1) + 1e-7
    return temperature**2 * F.kl_div(guesses, truth, reduction="batchmean")


def pupils_loss(
    module: nn.Module, inputs: tuple[Tensor, ...], labels: Tensor, alpha: float, temperature: float
) -> Tensor:
    """Return CE, and alpha times the distance from the server's logits where there are some."""
    logits = module(inputs[0])
    loss = F.cross_entropy(logits, labels)
    if len(inputs) == 1:
        return loss
    return loss + alpha * distance(logits, inputs[1], temperature)


def teachers_loss(
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Callable[[Tensor], object]],
    labels: Tensor,
    alpha: float,
    temperature: float,
    distil: bool,
) -> Tensor:
    """Return the server's loss, and leave its logits as the answer."""
    features, pupils, answer = inputs
    logits: Tensor = module(features)
    answer(logits.detach())
    loss = F.cross_entropy(logits, labels)
    return distance(logits, pupils, temperature) + alpha * loss if distil else loss
