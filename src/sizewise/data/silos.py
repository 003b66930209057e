"""Several data sets as one: silos with tasks of the same kind, but classes or tags of their own.

Each silo has its label set. All sets get the same number C of places, so that label s * C + c is
class c of silo s; a model has a head of C outputs for each set (see ``label_sets``). A training
sample's group is its silo: with ``data.partition = "natural"`` every silo is a device.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from sizewise.data.dataset import Dataset
from sizewise.errors import DataError

UNUSED = "O"
"""The name of a place that a silo with fewer classes leaves empty: to a tagger, no entity."""


def join(parts: Sequence[Dataset]) -> Dataset:
    """Return the data sets of some silos as one."""
    first = parts[0]
    for part in parts[1:]:
        own, others = ((p.shape, p.vocabulary, p.target) for p in (first, part))
        if own != others or part.target in ("score", "next"):
            raise DataError(
                f"silos need samples of one shape and the same kind of classes or tags; "
                f"{first.name} has {first.target} {first.shape}, {part.name} has {part.target} "
                f"{part.shape}"
            )
    places = max(part.classes for part in parts)
    names = [(*part.class_names, *[UNUSED] * (places - part.classes)) for part in parts]
    # Labels move to the places of their own set; what has none keeps none.
    train, test = (
        [torch.where(own < 0, own, own + number * places) for number, own in enumerate(labels)]
        for labels in ([p.train_labels for p in parts], [p.test_labels for p in parts])
    )
    owners = [torch.full((len(part.train_labels),), i) for i, part in enumerate(parts)]
    return replace(
        first,
        name="+".join(part.name for part in parts),
        train_inputs=torch.cat([part.train_inputs for part in parts]),
        train_labels=torch.cat(train),
        test_inputs=torch.cat([part.test_inputs for part in parts]),
        test_labels=torch.cat(test),
        class_names=tuple(chain.from_iterable(names)),
        groups=torch.cat(owners),
        silos=tuple(part.name.rpartition("/")[2] for part in parts),
    )
