"""Accuracy of deployed models on the test set.

Test batches have a fixed size and order, so that a batch can be scored by any process with the same
result, also when norms use batch statistics.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.data.augment import Transform


@dataclass(frozen=True)
class Score:
    """How a model did on some test samples.

    Attributes:
        correct: Samples whose largest logit is their class.
        loss_sum: Summed cross entropy.
        samples: How many there were.
    """

    correct: int
    loss_sum: float
    samples: int

    @property
    def accuracy(self) -> float:
        """The share of correct samples."""
        return self.correct / self.samples

    @property
    def loss(self) -> float:
        """The mean cross entropy."""
        return self.loss_sum / self.samples


def total(scores: Sequence[Score]) -> Score:
    """Add up scores in the given order."""
    return Score(
        sum(score.correct for score in scores),
        math.fsum(score.loss_sum for score in scores),
        sum(score.samples for score in scores),
    )


def batch_count(samples: int, batch: int) -> int:
    """Return how many test batches there are.

    A last batch of less than half the size joins the one before it: batch statistics of a few
    samples would be noise.
    """
    return max(1, (samples + batch // 2) // batch)


@torch.no_grad()
def score(
    module: nn.Module,
    images: Tensor,
    labels: Tensor,
    transform: Transform,
    batch: int,
    chosen: Iterable[int] | None = None,
) -> list[Score]:
    """Score a model on some or all test batches.

    Args:
        module: Gives logits (B, classes).
        images: All test images, uint8 (N, C, H, W).
        labels: Their classes, int64 (N,).
        transform: Normalises a batch.
        batch: Size of a test batch.
        chosen: Numbers of the batches to score; default: all.
    """
    count = batch_count(len(labels), batch)
    module.eval()
    scores = []
    for number in range(count) if chosen is None else chosen:
        start, stop = number * batch, len(labels) if number == count - 1 else (number + 1) * batch
        logits = module(transform(images[start:stop], None))
        truth = labels[start:stop]
        correct = int((logits.argmax(1) == truth).sum())
        loss = float(F.cross_entropy(logits, truth, reduction="sum"))
        scores.append(Score(correct, loss, stop - start))
    return scores
