"""Every error a user can cause or meet, each with one sentence that says what to do about it."""

from typing import ClassVar


class SizewiseError(Exception):
    """Base of all errors that sizewise raises on purpose.

    Attributes:
        exit_code: What the command line returns when this error ends it.
    """

    exit_code: ClassVar[int] = 2


class ConfigError(SizewiseError):
    """A config, option or argument that cannot be used as it stands."""


class DataError(SizewiseError):
    """A data set that cannot be read, or a partition that cannot be made."""


class ModelError(SizewiseError):
    """A model that cannot be built, or does not match its data."""


class NoChannelLeft(ModelError):
    """A width so small that some layer of the model would lose all its channels."""


class CheckpointError(SizewiseError):
    """A run folder or checkpoint that cannot be resumed from."""


class NothingToShow(CheckpointError):
    """A run of which no round has been evaluated yet."""


class BudgetTooSmall(SizewiseError):
    """A device whose bytes do not hold anything the method could give it to train.

    Attributes:
        budget: What the device has, in bytes.
        needed: The smallest budget that would do, in bytes.
    """

    exit_code = 3

    def __init__(self, budget: int, needed: int, what: str) -> None:
        super().__init__(
            f"{what} needs {needed:,} bytes, the device has {budget:,}; "
            f"give it at least {needed:,} bytes or choose a method that trains smaller submodels"
        )
        self.budget = budget
        self.needed = needed


class NobodyCanTrain(SizewiseError):
    """No device of the fleet can take part."""

    exit_code = 3


class NothingMerged(SizewiseError):
    """A run that got to its end without a single update that could be merged."""

    exit_code = 3


class UpdateRefused(SizewiseError):
    """An update that does not fit what its device was asked for; it is not merged."""


class EngineError(SizewiseError):
    """A worker process that died or could not be started."""

    exit_code = 1


class TooFewUpdates(EngineError):
    """A round to which so few devices answered in time that it does not count."""
