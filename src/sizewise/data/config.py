"""The `[data]` table of a config."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class DataConfig:
    """The `[data]` table: which samples, and how they are divided among the devices.

    Attributes:
        name: A listed data set, a folder or file, or "owner/name" on the Hugging Face hub. Of data
            that was given from Python: "memory:" and its own name.
        sha256: Of data that was given from Python: its hash. The run sets it.
        root: Folder that holds parquet folders by name; default: $SIZEWISE_DATA.
        target: What is learned from texts: their labels, or with "next" every next token, for which
            a table needs no labels.
        label: The column of labels, where its name does not tell.
        owner: A column that says whose a sample is: each owner is a device.
        holdout: The share of the samples that becomes the test set where there is none; default
            0.2, and 0 makes that an error.
        normalise: Bring float inputs to mean 0 and deviation 1, each channel or feature. Images of
            bytes always are.
        partition: How samples are dealt to devices; see `sizewise list partitions`. Default:
            `natural` with an owner, else `iid`.
        alpha: Concentration of the Dirichlet partitions: small is uneven.
        classes_per_device: For `shards` and `deck`.
        min_samples: Smallest shard that `dirichlet` accepts.
        samples_per_device: For `draw`.
        validation: The share of its samples that every device keeps to validate on, such as 0.2; it
            never trains on them. 0: none.
        train_limit: Use only this many training samples.
        test_limit: Use only this many test samples.
        image_size: Resize images to this many pixels a side.
        tokenizer: For texts: a `tokenizer.json`, or a folder, package or hub name with one;
            default: that of `model.weights`.
        max_tokens: For texts: cut or pad them to this many tokens.
        metric: How models are measured: accuracy, matthews or f1 of classes, entities or accuracy
            of tags, pearson of scores; default: as papers do.
        silos: Further data sets, each with labels of its own; `natural` makes each a device.
    """

    name: str = "digits"
    sha256: str | None = None
    root: str | None = None
    target: Literal["labels", "next"] = "labels"
    label: str | None = None
    owner: str | None = None
    holdout: float | None = None
    normalise: bool = False
    partition: str = ""
    alpha: float | None = None
    classes_per_device: int | None = None
    min_samples: int | None = None
    samples_per_device: int | None = None
    validation: float = 0.0
    train_limit: int | None = None
    test_limit: int | None = None
    image_size: int | None = None
    tokenizer: str | None = None
    max_tokens: int = 128
    metric: str | None = None
    silos: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.partition:
            object.__setattr__(self, "partition", "iid" if self.owner is None else "natural")

    def options(self) -> dict[str, Any]:
        """Return the partition's options that were given."""
        names = ("alpha", "classes_per_device", "min_samples", "samples_per_device")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, "validation": self.validation}
