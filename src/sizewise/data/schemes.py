"""Ways to divide the samples of a data set among devices, each as its paper's code does it.

A scheme answers one question: which device owns each sample? So the answer is one array, no sample
can have two owners, and ``UNUSED`` marks those that a scheme leaves out. K is the number of
devices, N of samples, C of classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sizewise.errors import ConfigError, DataError

IntArray = NDArray[np.int64]
UNUSED = -1
ATTEMPTS = 1000


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be divided, and how.

    Attributes:
        labels: (N,) in 0..classes-1.
        classes: The number of classes.
        devices: The number of devices, 1..N.
        alpha: The Dirichlet concentration: small is uneven, large is even.
        classes_per_device: How many classes a device is dealt (``shards``, ``deck``).
        min_samples: What every device must get at least (``capped-dirichlet``).
        groups: (N,), the natural group of each sample (``natural``).
    """

    labels: IntArray
    classes: int
    devices: int
    alpha: float
    classes_per_device: int
    min_samples: int
    groups: IntArray | None

    def class_indices(self) -> list[IntArray]:
        """Return the samples of each class, in the order of the data set."""
        counts = np.bincount(self.labels, minlength=self.classes)
        return np.split(np.argsort(self.labels, kind="stable"), np.cumsum(counts)[:-1])


Scheme = Callable[[Request, np.random.Generator], IntArray]
"""Takes a request and a generator, returns the owner of each sample, (N,), or ``UNUSED``."""


def iid(request: Request, rng: np.random.Generator) -> IntArray:
    """Shuffle, then cut K equal chunks; the N mod K samples left over stay unused."""
    return _equal_chunks(rng.permutation(len(request.labels)), request.devices)


def shards(request: Request, rng: np.random.Generator) -> IntArray:
    """Each class is cut into n K / C shards; a device takes one shard per class in its hand.

    A hand is n cards from a shuffled deck that holds every class n K / C times. Equal cards in a
    hand count once, so a device can own fewer than n classes, and some shards stay unused.
    """
    hand, devices, classes = request.classes_per_device, request.devices, request.classes
    per_class, rest = divmod(hand * devices, classes)
    if rest:
        raise ConfigError(
            f"shards needs classes_per_device x devices to be a multiple of the {classes} classes, "
            f"got {hand} x {devices}; change data.classes_per_device or fleet.devices"
        )
    deck = rng.permutation(np.repeat(np.arange(classes), per_class)).reshape(devices, hand)
    owner = np.full(len(request.labels), UNUSED)
    for label, samples in enumerate(request.class_indices()):
        # Equal shards from the front; what is left over goes, one each, to the first shards.
        size, leftover = divmod(len(samples), per_class)
        shard = np.concatenate([np.repeat(np.arange(per_class), size), np.arange(leftover)])
        takers = np.flatnonzero((deck == label).any(axis=1))
        taker_of_shard = np.full(per_class, UNUSED)
        taker_of_shard[rng.permutation(per_class)[: len(takers)]] = takers
        owner[samples] = taker_of_shard[shard]
    return owner


def deck(request: Request, rng: np.random.Generator) -> IntArray:
    """Classes are dealt from a deck, each is split evenly among the devices that hold it.

    The deck has one card per class and is shuffled anew when it runs out; device k takes the next
    L cards. If C mod L is not 0, a device can be dealt a class twice and then owns a double share.
    """
    hand, devices, classes = request.classes_per_device, request.devices, request.classes
    decks = -(-hand * devices // classes)
    cards = np.concatenate([rng.permutation(classes) for _ in range(decks)])[: hand * devices]
    owner = np.full(len(request.labels), UNUSED)
    for label, samples in enumerate(request.class_indices()):
        holders = np.flatnonzero(cards == label) // hand
        if len(holders):
            owner[samples] = np.repeat(holders, _even_sizes(len(samples), len(holders)))
    return owner


def capped_dirichlet(request: Request, rng: np.random.Generator) -> IntArray:
    """Each class is spread by Dirichlet(alpha) over the devices that hold less than N / K.

    Tried again until every device has ``min_samples``; sizes stay unequal. This is what the code of
    FedML, of NIID-Bench and of most papers after them does, so it is also called ``dirichlet``.
    """
    total, devices, wanted = len(request.labels), request.devices, request.min_samples
    class_indices = request.class_indices()
    smallest = 0
    for _ in range(ATTEMPTS if wanted * devices <= total else 0):
        sizes = np.zeros(devices, dtype=np.int64)
        cuts = []
        for samples in class_indices:
            is_open = sizes < total / devices
            share = rng.dirichlet(np.full(devices, request.alpha)) * is_open
            # With a tiny alpha the whole class can fall to devices that are already full.
            share = share / share.sum() if share.sum() > 0 else is_open / is_open.sum()
            ends = (np.cumsum(share) * len(samples)).astype(np.int64)
            ends[-1] = len(samples)
            cuts.append(np.diff(ends, prepend=0))
            sizes += cuts[-1]
        smallest = max(smallest, int(sizes.min()))
        if sizes.min() >= wanted:
            owner = np.empty(total, dtype=np.int64)
            for samples, counts in zip(class_indices, cuts, strict=True):
                owner[rng.permutation(samples)] = np.repeat(np.arange(devices), counts)
            return owner
    raise DataError(
        f"spreading classes by Dirichlet({request.alpha}) could not give each of {devices} devices "
        f"{wanted} of {total} samples (the best attempt's smallest device had {smallest}); "
        "lower data.min_samples or fleet.devices, or raise data.alpha"
    )


def balanced_dirichlet(request: Request, rng: np.random.Generator) -> IntArray:
    """Device by device, q ~ Dirichlet(alpha) over classes, then N / K samples drawn by q.

    The idea is that of Hsu et al. (2019), the details are FeDepth's.

    Samples are drawn without replacement from those still unassigned, with weight q[label]. Sizes
    are equal; late devices get what is left, so their mix drifts away from q.
    """
    labels, size = request.labels, len(request.labels) // request.devices
    owner = np.full(len(labels), UNUSED)
    free = np.arange(len(labels))
    for device in range(request.devices):
        weight = rng.dirichlet(np.full(request.classes, request.alpha))[labels[free]]
        wanted, others = np.flatnonzero(weight > 0), np.flatnonzero(weight == 0)
        if len(wanted) >= size:
            # The smallest of Exp(1) / weight are a weighted draw without replacement (Efraimidis
            # and Spirakis, 2006).
            with np.errstate(over="ignore"):
                key = rng.exponential(size=len(wanted)) / weight[wanted]
            drawn = wanted[np.argpartition(key, size - 1)[:size]]
        else:
            extra = rng.choice(others, size - len(wanted), replace=False)
            drawn = np.concatenate([wanted, extra])
        owner[free[drawn]] = device
        free = np.delete(free, drawn)
    return owner


def equal_dirichlet(request: Request, rng: np.random.Generator) -> IntArray:
    """Each class is spread by Dirichlet(alpha), then the whole is cut into K equal chunks.

    The samples are listed device by device, class by class; a device's surplus spills into the
    next device's chunk. The N mod K samples at the end stay unused.
    """
    devices = request.devices
    drawn = np.empty(len(request.labels), dtype=np.int64)
    for samples in request.class_indices():
        counts = rng.multinomial(len(samples), rng.dirichlet(np.full(devices, request.alpha)))
        drawn[samples] = np.repeat(np.arange(devices), counts)
    return _equal_chunks(np.lexsort((request.labels, drawn)), devices)


def split(request: Request, rng: np.random.Generator) -> IntArray:
    """Shuffle, then cut K chunks whose sizes differ by at most one."""
    total = len(request.labels)
    owner = np.empty(total, dtype=np.int64)
    sizes = _even_sizes(total, request.devices)
    owner[rng.permutation(total)] = np.repeat(np.arange(request.devices), sizes)
    return owner


def natural(request: Request, rng: np.random.Generator) -> IntArray:
    """One group (such as a writer) per device; random groups if there are more than devices."""
    if request.groups is None:
        raise DataError(
            "natural needs a data set that says who wrote each sample, and this one does not; "
            "use femnist or another data.partition"
        )
    names, group = np.unique(request.groups, return_inverse=True)
    if request.devices > len(names):
        raise DataError(
            f"natural has {len(names)} groups for {request.devices} devices; "
            f"set fleet.devices to {len(names)} or fewer"
        )
    chosen = np.sort(rng.choice(len(names), request.devices, replace=False))
    device_of_group = np.full(len(names), UNUSED)
    device_of_group[chosen] = np.arange(request.devices)
    return device_of_group[group]


SCHEMES: dict[str, Scheme] = {
    "iid": iid,
    "shards": shards,
    "deck": deck,
    "capped-dirichlet": capped_dirichlet,
    "balanced-dirichlet": balanced_dirichlet,
    "equal-dirichlet": equal_dirichlet,
    "split": split,
    "natural": natural,
}


def _even_sizes(total: int, parts: int) -> IntArray:
    """Return sizes that add up to total and differ by at most one, the larger ones first."""
    size, rest = divmod(total, parts)
    return size + (np.arange(parts) < rest)


def _equal_chunks(order: IntArray, devices: int) -> IntArray:
    """Return the owners when ``order`` is cut into equal contiguous chunks, one per device."""
    size = len(order) // devices
    owner = np.full(len(order), UNUSED)
    owner[order[: size * devices]] = np.repeat(np.arange(devices), size)
    return owner
