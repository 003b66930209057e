"""Engines: where devices do their work. The method code is the same on all of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from sizewise.evaluation import Score
from sizewise.plan import Plan, Refusal, Update
from sizewise.state import State

Outcome = Update | Refusal


class Engine(Protocol):
    """What the federation needs of an engine."""

    def train(self, state: State, plans: Sequence[Plan]) -> Iterator[Outcome]:
        """Yield what each plan's device sent back, in the order of the plans."""
        ...

    def evaluate(self, state: State) -> Mapping[str, Score]:
        """Score every deployed model on the test set."""
        ...

    def close(self) -> None:
        """Let go of processes and memory."""
        ...
