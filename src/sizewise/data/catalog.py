"""The names a config may use for data, in one light place: no torch, no numpy.

A data set that is not listed here still loads: by the path of a file or folder, or by its
``owner/name`` on the Hugging Face hub.
"""

from dataclasses import dataclass
from pathlib import Path

MEMORY = "memory:"
"""What the names of data sets begin with that were given in memory; see ``memory``."""


def own_name(name: str) -> str:
    """Return what to call the data that a config names."""
    return name.removeprefix(MEMORY) if name.startswith(MEMORY) else Path(name).name


@dataclass(frozen=True)
class Source:
    """What is known about a data set before it is read.

    Attributes:
        description: One line for ``sizewise list datasets``.
        hub: Its id on the Hugging Face hub; None for data that ships with a dependency.
        config: Which of the hub data set's configurations to take.
        holdout: The share of the training samples that becomes the test set where there is none;
            None: the usual one.
        mean: Channel means that papers normalise with; None: measured on the training set.
        std: Channel deviations that papers normalise with; None: measured.
        test: The split to test on, where the one called "test" hides its labels.
        metric: How papers measure; None: by the kind of labels. See ``sizewise.steps.metrics``.
    """

    description: str
    hub: str | None = None
    config: str | None = None
    holdout: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    test: str | None = None
    metric: str | None = None


def _glue(task: str, about: str, metric: str | None = None, test: str = "validation") -> Source:
    return Source(f"GLUE: {about}", "nyu-mll/glue", task, test=test, metric=metric)


DATASETS: dict[str, Source] = {
    "digits": Source("1,797 handwritten digits, 8x8 grey, 10 classes; needs no download"),
    "cifar10": Source(
        "60,000 photographs, 32x32 RGB, 10 classes",
        hub="uoft-cs/cifar10",
        mean=(0.4914, 0.4822, 0.4465),
        # Not the true deviations (.2470 .2435 .2616) but the mean deviation within an image:
        # HeteroFL, FedRolex, SLT, NeFL, FjORD and FeDepth all normalise with these.
        std=(0.2023, 0.1994, 0.2010),
    ),
    "cifar100": Source(
        "60,000 photographs, 32x32 RGB, 100 classes (fine labels)",
        hub="uoft-cs/cifar100",
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
    ),
    "fashion_mnist": Source(
        "70,000 pieces of clothing, 28x28 grey, 10 classes", hub="zalando-datasets/fashion_mnist"
    ),
    "mnist": Source("70,000 handwritten digits, 28x28 grey, 10 classes", hub="ylecun/mnist"),
    "svhn": Source(
        "99,289 house numbers, 32x32 RGB, 10 classes",
        hub="ufldl-stanford/svhn",
        config="cropped_digits",
    ),
    "femnist": Source(
        "handwritten characters by writer, 28x28 grey, 62 classes",
        hub="flwrlabs/femnist",
        holdout=0.1,  # The hub has one split only; LEAF, where it comes from, keeps 10 % for tests.
    ),
    "tiny_imagenet": Source(
        "110,000 photographs, 64x64 RGB, 200 classes", hub="zh-plus/tiny-imagenet"
    ),
    "glue/cola": _glue("cola", "9,594 sentences, grammatical or not", "matthews"),
    "glue/mnli": _glue("mnli", "premise and hypothesis, 3 classes", test="validation_matched"),
    "glue/mrpc": _glue("mrpc", "4,076 pairs of sentences, same meaning or not", "f1"),
    "glue/qnli": _glue("qnli", "question and sentence, answered or not"),
    "glue/qqp": _glue("qqp", "pairs of questions, same or not", "f1"),
    "glue/rte": _glue("rte", "2,767 pairs of sentences, entailed or not"),
    "glue/sst2": _glue("sst2", "68,221 phrases of film reviews, good or bad"),
    "glue/stsb": _glue("stsb", "7,249 pairs of sentences, similar by 0 to 5"),
    "glue/wnli": _glue("wnli", "706 pairs of sentences, entailed or not"),
    "ner/bc5cdr": Source("13,938 sentences, chemicals and diseases tagged", "tner/bc5cdr"),
    "ner/ncbi_disease": Source("7,287 sentences, diseases tagged", "ncbi/ncbi_disease"),
}

PARTITIONS: dict[str, str] = {
    "iid": "equal random parts",
    "shards": "a few equal one-class shards per device (HeteroFL)",
    "deck": "classes dealt like cards, each split evenly among its holders (SplitMix, FeDepth)",
    "dirichlet": "the usual Dir(alpha), another name for capped-dirichlet",
    "capped-dirichlet": "every class spread over the devices by Dirichlet(alpha), sizes unequal "
    "(FedML, NIID-Bench, NeFL, DepthFL, FedGKT, FedIN, unbalanced FeDepth)",
    "balanced-dirichlet": "every device draws its classes by Dirichlet(alpha), equal sizes "
    "(Hsu et al., FeDepth)",
    "equal-dirichlet": "every class spread by Dirichlet(alpha), then cut to equal sizes (SLT)",
    "split": "random parts, sizes differ by at most one (InclusiveFL)",
    "natural": "one writer, or other owner (data.owner), per device",
    "draw": "every device draws its own samples from one pool, on demand: for huge fleets",
}

OTHER_NAMES = {"dirichlet": "capped-dirichlet"}
"""Partitions that have a second name."""

AUGMENTATIONS: dict[str, str] = {
    "none": "normalise only",
    "flip": "mirror half of the images",
    "shift": "random crop of the padded image",
    "crop-flip": "random crop of the padded image, mirror half of them",
    "crop-flip-cutout": "crop-flip, then blank a square of half the image's side",
}
