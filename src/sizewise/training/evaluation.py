"""Scores of deployed models on the test set.

Test batches have a fixed size and order, so that a batch can be scored by any process with the same
result, also when norms use batch statistics.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sizewise.data.dataset import Dataset
from sizewise.steps import metrics
from sizewise.steps.label_sets import divide
from sizewise.steps.step import compare
from sizewise.torch_tools.placement import HOST, device_of, moved


@dataclass(frozen=True)
class Score:
    """How a model did on some test samples.

    Attributes:
        counts: What the data set's metric counts, for each label set; see `metrics`.
        loss_sum: Summed loss.
        samples: How many there were.
    """

    counts: tuple[float, ...]
    loss_sum: float
    samples: int

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.loss_sum / self.samples

    def values(self, metric: str, sets: int = 1) -> list[float]:
        """Return a metric for each label set."""
        size = len(self.counts) // sets
        parts = (self.counts[i * size : (i + 1) * size] for i in range(sets))
        return [metrics.value(metric, part) for part in parts]


def total(scores: Sequence[Score]) -> Score:
    """Add up scores in the given order."""
    return Score(
        tuple(math.fsum(counts) for counts in zip(*(s.counts for s in scores), strict=True)),
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
    module: nn.Module, dataset: Dataset, batch: int, chosen: Iterable[int] | None = None
) -> list[Score]:
    """Score a model on some or all test batches.

    Args:
        module: Gives logits (B, classes), tags' logits (B, T, classes) or scores (B, 1).
        dataset: Has the test samples.
        batch: Size of a test batch.
        chosen: Numbers of the batches to score; default: all.
    """
    labels, transform = dataset.test_labels, dataset.transform()
    count = batch_count(len(labels), batch)
    module.eval()
    device = device_of(module)
    scores = []
    for number in range(count) if chosen is None else chosen:
        start, stop = number * batch, len(labels) if number == count - 1 else (number + 1) * batch
        inputs = moved(transform(dataset.test_inputs[start:stop], None), device)
        outputs = moved(module(inputs), HOST)
        truth = labels[start:stop]
        counts: list[float] = []
        for number_of_set, (own, own_truth) in enumerate(divide(outputs, truth, dataset.sets)):
            counts += metrics.count(dataset.metric, own, own_truth, dataset.names(number_of_set))
        loss = len(truth) * float(compare(outputs, truth))
        scores.append(Score(tuple(counts), loss, len(truth)))
    return scores
