"""Scores of deployed models, on the test set or on samples that devices validate on.

Batches have a fixed size and order, so that a batch can be scored by any process with the same
result, also when norms use batch statistics.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from sizewise.data.dataset import Dataset
from sizewise.steps import metrics
from sizewise.steps.label_sets import divide
from sizewise.steps.step import compare
from sizewise.torch_tools.placement import HOST, device_of, moved


@dataclass(frozen=True)
class Score:
    """How a model did on some samples.

    Attributes:
        counts: What the data set's metric counts, for each label set; see `metrics`.
        loss_sum: Summed loss.
        samples: How many there were.
        right: Of validation samples: how many of each one's classes or tags were found, in order;
            empty where samples have scores.
        asked: And out of how many.
    """

    counts: tuple[float, ...]
    loss_sum: float
    samples: int
    right: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()

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
        tuple(chain.from_iterable(score.right for score in scores)),
        tuple(chain.from_iterable(score.asked for score in scores)),
    )


def batch_count(samples: int, batch: int) -> int:
    """Return how many batches there are.

    A last batch of less than half the size joins the one before it: batch statistics of a few
    samples would be noise.
    """
    return max(1, (samples + batch // 2) // batch)


@torch.no_grad()
def score(
    module: nn.Module,
    dataset: Dataset,
    batch: int,
    chosen: Iterable[int] | None = None,
    rows: Tensor | None = None,
) -> list[Score]:
    """Score a model on some or all batches of the test set.

    Args:
        module: Gives logits (B, classes), tags' logits (B, T, classes) or scores (B, 1).
        dataset: Has the samples.
        batch: Size of a batch.
        chosen: Numbers of the batches to score; default: all.
        rows: In place of the test set, the training samples of these numbers, int64 (n,), which a
            device validates on.
    """
    inputs, labels = dataset.test_inputs, dataset.test_labels
    if rows is not None:
        inputs, labels = dataset.train_inputs, dataset.train_labels
    samples, transform = len(labels) if rows is None else len(rows), dataset.transform()
    count = batch_count(samples, batch)
    module.eval()
    device = device_of(module)
    scores = []
    for number in range(count) if chosen is None else chosen:
        part = slice(number * batch, samples if number == count - 1 else (number + 1) * batch)
        places = part if rows is None else rows[part]
        outputs = moved(module(moved(transform(inputs[places], None), device)), HOST)
        truth = labels[places]
        counts: list[float] = []
        for number_of_set, (own, own_truth) in enumerate(divide(outputs, truth, dataset.sets)):
            counts += metrics.count(dataset.metric, own, own_truth, dataset.names(number_of_set))
        loss = len(truth) * float(compare(outputs, truth))
        right, asked = (), ()
        if rows is not None and dataset.target != "score":
            right, asked = metrics.hits(outputs, truth, dataset.sets).T.tolist()
        scores.append(Score(tuple(counts), loss, len(truth), tuple(right), tuple(asked)))
    return scores
