"""Engines: where devices do their work. The method code is the same on all of them.

`local` works in this process, `pool` in several over shared memory (`shared_tensors`); each has a
`device_runner`, which turns a plan into an update. `together` trains tiny models of several devices
in one call; `packing` says how many fit an accelerator. Imports `families`, `config` and below;
machines of their own are the `flower` room's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

# Only names of types: a Flower node that tells its budget should not have to import torch.
if TYPE_CHECKING:
    from torch import Tensor

    from sizewise.config import Config
    from sizewise.data.dataset import Dataset
    from sizewise.exchange.plan import Plan, Refusal, Update
    from sizewise.exchange.state import State
    from sizewise.families.base import Method
    from sizewise.training.evaluation import Score

Outcome: TypeAlias = "Update | Refusal"

FACTS = ("samples", "steps", "loss", "peak_bytes", "seconds", "rows")
"""What an update says beside its tensors, by its attributes."""


class Engine(Protocol):
    """What the federation needs of an engine.

    Attributes:
        validates: Whether it has the samples that devices validate on.
    """

    validates: bool

    def train(self, state: "State", plans: "Sequence[Plan]") -> Iterator[Outcome]:
        """Yield what each plan's device sent back, in the order of the plans."""

    def evaluate(self, state: "State") -> "Mapping[str, Score]":
        """Score every deployed model on the test set."""

    def validate(self, state: "State", rows: "Mapping[str, Tensor]") -> "Mapping[str, Score]":
        """Score deployed models, each on some training samples, given by their numbers."""

    def close(self) -> None:
        """Let go of processes and memory."""


class RemoteEngine(Engine, Protocol):
    """An engine that works elsewhere, and so has to be handed the run first."""

    def open(self, config: "Config", method: "Method", dataset: "Dataset", partition: str) -> None:
        """Hand over the run: its config, its method and data, and the file of its partition."""
