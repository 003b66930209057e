"""What to measure on a test set, as sums that parts of it can be added to in any order.

A metric is two functions: `count` looks at some test samples and returns a few numbers; `value`
turns the numbers, added up over all samples, into the figure that papers print. So a test set can
be divided among processes, whatever the metric.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from sizewise.steps.label_sets import own_head
from sizewise.steps.step import IGNORED

METRICS: dict[str, tuple[str, ...]] = {
    "class": ("accuracy", "matthews", "f1"),
    "tags": ("entities", "accuracy"),
    "score": ("pearson",),
    "next": ("likelihood", "accuracy"),
}
"""By what a model has to find; the first is the usual one.

accuracy: share of correct classes or tags. matthews: correlation of two or more classes (CoLA).
f1: of class 1 (MRPC, QQP). entities: F1 of whole entities, as seqeval counts (NER). pearson:
correlation of scores (STS-B). likelihood: geometric mean of the probabilities that next tokens
were given. That is 1 / perplexity: for this one, too, more is better, and 1 is the most.
"""

Entity = tuple[int, int, int, str]


def count(metric: str, outputs: Tensor, targets: Tensor, names: Sequence[str]) -> list[float]:
    """Return the sums of a metric over some samples.

    Args:
        metric: A name in `METRICS`.
        outputs: Logits (B, classes) or (B, T, classes); scores (B, 1).
        targets: Classes (B,), tags (B, T) or scores (B,).
        names: Of the classes; tags are called "O", "B-..." and "I-...".
    """
    if metric == "pearson":
        x, y = outputs.squeeze(-1).double(), targets.double()
        sums = (x, y, x * x, y * y, x * y)
        return [float(len(x)), *(float(values.sum()) for values in sums)]
    if metric == "likelihood":
        rows, following = outputs.flatten(0, -2), targets.flatten()
        lost = F.cross_entropy(rows, following, ignore_index=IGNORED, reduction="none")
        return [float(lost.double().sum()), float((following != IGNORED).sum())]
    guesses = outputs.argmax(-1)
    if metric == "entities":
        found = entities(guesses.where(targets != IGNORED, IGNORED).tolist(), names)
        truth = entities(targets.tolist(), names)
        return [float(len(found & truth)), float(len(found)), float(len(truth))]
    if metric == "accuracy":
        counted = targets != IGNORED
        return [float((guesses == targets)[counted].sum()), float(counted.sum())]
    classes = len(names)
    table = torch.bincount(targets * classes + guesses, minlength=classes**2)
    return [float(entry) for entry in table]


def hits(outputs: Tensor, targets: Tensor, sets: int = 1) -> Tensor:
    """Return how many of each sample's classes or tags are right, and of how many, int64 (B, 2).

    Args:
        outputs: Logits (B, classes) or (B, T, classes); with several label sets as in `label_sets`.
        targets: Classes (B,) or tags (B, T).
        sets: The number of label sets.
    """
    own, truth = own_head(outputs, targets) if sets > 1 else (outputs, targets)
    right = (own.argmax(-1) == truth).view(targets.shape)
    counted = targets != IGNORED
    return torch.stack(
        [(right & counted).view(len(targets), -1).sum(1), counted.view(len(targets), -1).sum(1)], 1
    )


def perplexity(likelihood: float) -> float | None:
    """Return what papers print in place of a likelihood; None if it is beyond all numbers."""
    return 1 / likelihood if likelihood > 1e-300 else None


def value(metric: str, counts: Sequence[float]) -> float:
    """Return a metric, given its sums over the whole test set; 0 where it is not defined."""
    if metric == "accuracy":
        return _ratio(counts[0], counts[1])
    if metric == "likelihood":
        return math.exp(-_ratio(counts[0], counts[1]))
    if metric == "entities":
        hits, found, truth = counts
        return _ratio(2 * hits, found + truth)
    if metric == "pearson":
        n, x, y, xx, yy, xy = counts
        return _ratio(n * xy - x * y, _root(n * xx - x * x) * _root(n * yy - y * y))
    table = torch.tensor(counts, dtype=torch.float64).view(math.isqrt(len(counts)), -1)
    if metric == "f1":
        return _ratio(2 * float(table[1, 1]), float(table[1].sum() + table[:, 1].sum()))
    actual, guessed, total = table.sum(1), table.sum(0), table.sum()
    covariance = float(table.trace() * total - actual @ guessed)
    spread = _root(float(total**2 - actual @ actual)) * _root(float(total**2 - guessed @ guessed))
    return _ratio(covariance, spread)


def entities(rows: Sequence[Sequence[int]], names: Sequence[str]) -> set[Entity]:
    """Return the entities of tagged sentences: row, first and last place, type.

    As seqeval's default and the CoNLL script count: an entity begins with B, and also with an I
    that does not go on with the type before it. Places without a tag are not there at all.

    Args:
        rows: Tags of each place of each sentence; below 0: it has none.
        names: Of the tags.
    """
    found = set()
    for row, tags in enumerate(rows):
        start, kind, last = 0, "", 0
        for place, tag in enumerate(tags):
            if tag < 0:
                continue
            mark, _, name = names[tag].partition("-")
            if kind and (mark != "I" or name != kind):
                found.add((row, start, last, kind))
                kind = ""
            if mark != "O" and not kind:
                start, kind = place, name
            last = place
        if kind:
            found.add((row, start, last, kind))
    return found


def _ratio(part: float, whole: float) -> float:
    # Outputs that overflow make sums that are no numbers, which JSON could not hold either.
    return part / whole if whole and math.isfinite(part / whole) else 0.0


def _root(variance: float) -> float:
    # Rounding can make the variance of equal numbers a little negative.
    return math.sqrt(max(variance, 0.0))
