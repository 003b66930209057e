"""From samples, however they came, to a `Dataset`: a test set, numbers for classes, statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sizewise.common import rng
from sizewise.common.structure import format_bytes
from sizewise.data import labels
from sizewise.data.arrays import different, in_channels
from sizewise.data.dataset import Dataset
from sizewise.data.decode import channel_statistics, float_statistics
from sizewise.data.labels import Labels
from sizewise.data.tables import Values
from sizewise.errors import ConfigError, DataError
from sizewise.steps.metrics import METRICS

HOLDOUT = 0.2
"""The share of the samples that becomes the test set where there is none."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Some samples in memory.

    Attributes:
        inputs: As a `Dataset` holds them, N of them.
        labels: N of them.
        owners: Whose each sample is, N of them; or nothing.
        vocabulary: How many token ids there are; 0: these are no texts.
        tokenizer: What made the token ids, as JSON.
        notes: What should be said about them.
    """

    inputs: Tensor
    labels: Labels
    owners: Values = ()
    vocabulary: int = 0
    tokenizer: str = ""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Tensor) -> "Samples":
        owners = np.asarray(self.owners)[rows.numpy()] if len(self.owners) else ()
        return replace(self, inputs=self.inputs[rows], labels=self.labels[rows], owners=owners)


def checked(where: str, samples: Samples) -> Samples:
    """Return samples; raise DataError unless each has one label, and one owner or none has."""
    for what, count in (("labels", len(samples.labels.values)), ("owners", len(samples.owners))):
        if count not in (len(samples), *([0] if what == "owners" else [])):
            raise DataError(
                f"{where} has {len(samples):,} inputs and {count:,} {what}; give one for each"
            )
    return samples


def joined(parts: Sequence[Samples], where: str) -> Samples:
    """Return several sets of samples as one, their owners left out."""
    first = parts[0]
    for part in parts[1:]:
        own, other = ((p.inputs.shape[1:], p.inputs.dtype, p.labels.target) for p in (first, part))
        if own != other:
            raise different(where, [tuple(own[0]), tuple(other[0])])
    inputs = first.inputs if len(parts) == 1 else torch.cat([part.inputs for part in parts])
    found = labels.joined([part.labels for part in parts], where)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return replace(first, inputs=inputs, labels=found, owners=(), notes=notes)


def held_out(
    strata: Tensor, share: float, groups: Tensor | None = None, purpose: str = "hold-out"
) -> Tensor:
    """Return which samples to test on, bool (N,): the same share of each class, and of each group.

    Args:
        strata: The class of each sample, int64 (N,).
        share: Above 0 and below 1.
        groups: Whose each sample is, int64 (N,).
        purpose: What the random choice is named after.
    """
    order = torch.randperm(len(strata), generator=rng.torch_generator(0, purpose))
    for keys in (strata, groups):
        if keys is not None:
            order = order[keys[order].argsort(stable=True)]
    # Sorted by group and class, every fifth sample is a fifth of each.
    steps = np.floor(np.arange(-1, len(strata)) * share)
    chosen = torch.zeros(len(strata), dtype=torch.bool)
    chosen[order[torch.from_numpy(np.diff(steps) > 0)]] = True
    return chosen


def assembled(
    name: str,
    train: Samples,
    test: Samples | None,
    *,
    holdout: float | None = None,
    normalise: bool = False,
    divided: bool = False,
    metric: str | None = None,
) -> Dataset:
    """Return a data set of training and test samples.

    Args:
        name: Its name.
        train: The training samples.
        test: The test samples; None: a share of the training samples is held out.
        holdout: That share; 0 makes a missing test set an error. Default: `HOLDOUT`.
        normalise: Bring float inputs to mean 0 and deviation 1, by channel or feature.
        divided: Their owners are the devices.
        metric: How models are measured; default: by the kind of labels.
    """
    notes = list(train.notes)
    groups = _numbered(name, train.owners)
    found = train.labels
    class_names = _class_names(name, found)
    if test is None:
        share = HOLDOUT if holdout is None else holdout
        train, groups, test = _divided(name, train, groups, share, divided)
        notes.append(
            f"there was no test set: {share:.3g} of the samples, {len(test):,} of "
            f"{len(train) + len(test):,}, are held out for it"
        )
        found = train.labels
    else:
        other = test.labels.numbered_as(found.named() if test.labels.names else (), f"{name}, test")
        test = replace(test, labels=replace(other, names=found.names))
    train_inputs, test_inputs = _in_one_shape(name, train.inputs, test.inputs)
    mean, std = _statistics(train_inputs, normalise, notes)
    train_labels, test_labels = found.values, test.labels.values
    if found.target == "score":
        # As images are normalised: else training would first have to find the mean.
        middle, deviation = train_labels.mean(), train_labels.std(correction=0).clamp(min=1e-6)
        train_labels, test_labels = ((s - middle) / deviation for s in (train_labels, test_labels))
    return Dataset(
        name=name,
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        class_names=class_names,
        mean=mean,
        std=std,
        groups=groups,
        vocabulary=train.vocabulary,
        target=found.target,
        metric=metric or METRICS[found.target][0],
        tokenizer=train.tokenizer,
        divided=divided,
        notes=tuple(notes),
    )


def said(where: str, samples: Samples, *, drawn: bool) -> Samples:
    """Return samples with a note about what they were read from, and the bytes they take.

    Transforms of samples that were drawn one by one may have made random choices.
    """
    size = samples.inputs.numel() * samples.inputs.element_size()
    note = f"{where} was read once, {len(samples):,} samples, {format_bytes(size)} in memory"
    fixed = "; what its transforms draw at random stays as drawn" if drawn else ""
    return replace(samples, notes=(*samples.notes, note + fixed))


def _class_names(name: str, found: Labels) -> tuple[str, ...]:
    if not found.names and found.target == "class" and int(found.values.max()) >= len(found.values):
        raise DataError(
            f"{name} has {len(found.values):,} training samples and labels up to "
            f"{int(found.values.max()):,}; number the classes from 0, or give words"
        )
    return found.named()


def _divided(
    name: str, samples: Samples, groups: Tensor | None, share: float, divided: bool
) -> tuple[Samples, Tensor | None, Samples]:
    """Return the training samples, their groups, and the test samples that were held out."""
    if share == 0:
        raise DataError(f"{name} has no test set, and data.holdout is 0; add one, or raise it")
    if not 0 < share < 1:
        raise ConfigError(f"data.holdout must lie between 0 and 1, got {share}")
    values = samples.labels.values
    strata = values if samples.labels.target == "class" else torch.zeros(len(samples)).long()
    chosen = held_out(strata, share, groups if divided else None)
    if bool(chosen.all()):
        raise DataError(f"{name} has {len(samples)} samples, too few to hold some out for tests")
    rest = None if groups is None else groups[~chosen]
    return samples[~chosen], rest, replace(samples, owners=())[chosen]


def _numbered(name: str, owners: Values) -> Tensor | None:
    """Return a number for the owner of each sample, int64 (N,); None if nobody owns any."""
    if len(owners) == 0:
        return None
    try:
        found, numbers = np.unique(np.asarray(owners), return_inverse=True)
        # An array of words would have "nan" as one of them.
        known = found.dtype.kind in "biuUTO" and not any(map(labels.missing, owners))
    except TypeError:  # Values that cannot be compared, such as numbers and words.
        known = False
    if not known:
        raise DataError(
            f"{name}: owners are whole numbers or words, one for each sample, and others came or "
            "some are missing; correct the column of data.owner"
        )
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64))


def _in_one_shape(name: str, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Return training and test inputs with the same channels."""
    if train.ndim == 4 and test.ndim == 4 and 1 in (train.shape[1], test.shape[1]):
        channels = max(train.shape[1], test.shape[1])
        train, test = in_channels(train, channels), in_channels(test, channels)
    if train.dtype != test.dtype:
        raise DataError(
            f"{name}: training inputs are {train.dtype}, test inputs {test.dtype}; convert them to "
            "one type"
        )
    return train, test


def _statistics(
    inputs: Tensor, normalise: bool, notes: list[str]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation that inputs are normalised with, if they are."""
    if inputs.dtype == torch.uint8:
        return channel_statistics(inputs)
    if not inputs.is_floating_point():
        return (), ()
    if normalise:
        return float_statistics(inputs)
    deviation, mean = torch.std_mean(inputs, correction=0)
    notes.append(
        f"float inputs are taken as they are, with mean {float(mean):.3g} and deviation "
        f"{float(deviation):.3g}; data.normalise = true brings each channel or feature to 0 and 1"
    )
    return (), ()
