"""Several data sets as one: silos with tasks of the same kind, but classes or tags of their own.

Each silo has its label set. All sets get the same number C of places, so that label s * C + c is
class c of silo s; a model has a head of C outputs for each set (see ``label_sets``). A training
sample's group is its silo: with ``data.partition = "natural"`` every silo is a device.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from sizewise.data.dataset import Dataset
from sizewise.errors import DataError

UNUSED = "O"
"""The name of a place that a silo with fewer classes leaves empty: to a tagger, no entity."""


def join(parts: Sequence[Dataset]) -> Dataset:
    """Return the data sets of some silos as one."""
    first = parts[0]
    for part in parts[1:]:
        same = (part.shape, part.vocabulary, part.target) == (
            *(first.shape, first.vocabulary, first.target),
        )
        if not same or part.target == "score":
            raise DataError(
                f"silos need samples of one shape and the same kind of classes or tags; "
                f"{first.name} has {first.target} {first.shape}, {part.name} has {part.target} "
                f"{part.shape}"
            )
    places = max(part.classes for part in parts)
    names = [(*part.class_names, *[UNUSED] * (places - part.classes)) for part in parts]
    shifted = [
        (_shift(part.train_labels, number * places), _shift(part.test_labels, number * places))
        for number, part in enumerate(parts)
    ]
    owners = [torch.full((len(part.train_labels),), i) for i, part in enumerate(parts)]
    return Dataset(
        name="+".join(part.name for part in parts),
        train_inputs=torch.cat([part.train_inputs for part in parts]),
        train_labels=torch.cat([train for train, _ in shifted]),
        test_inputs=torch.cat([part.test_inputs for part in parts]),
        test_labels=torch.cat([test for _, test in shifted]),
        class_names=tuple(chain.from_iterable(names)),
        mean=first.mean,
        std=first.std,
        groups=torch.cat(owners),
        vocabulary=first.vocabulary,
        target=first.target,
        metric=first.metric,
        silos=tuple(part.name.rpartition("/")[2] for part in parts),
    )


def _shift(labels: Tensor, by: int) -> Tensor:
    """Return labels moved to their own set; what has none keeps none."""
    return torch.where(labels < 0, labels, labels + by)
