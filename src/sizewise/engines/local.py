"""The in-process engine: one device after the other, on one thread."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sizewise.engines import Outcome
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import EngineError
from sizewise.exchange.plan import Plan, portions
from sizewise.exchange.state import State
from sizewise.training import evaluation
from sizewise.training.evaluation import Score


class LocalEngine:
    """Trains devices in this process."""

    validates = True

    def __init__(self, runner: DeviceRunner) -> None:
        self.runner = runner
        # One thread, as in a worker: sums are then added in the same order, bit for bit.
        torch.set_num_threads(1)

    def train(self, state: State, plans: Sequence[Plan]) -> Iterator[Outcome]:
        """Yield what each plan's device sent back, in the order of the plans."""
        for portion in portions(plans, lambda plan: self.runner.together):
            try:
                yield from self.runner.train_all(state, portion, [None] * len(portion))
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"{self.runner.method.task.device} is out of memory with a single device in "
                    f"training ({error}); lower recipe.batch, set recipe.levers to 'auto', or end "
                    f"what else uses it, and go on with `sizewise resume`"
                ) from None

    def evaluate(self, state: State) -> dict[str, Score]:
        """Score every deployed model on the test set."""
        sizes = self.runner.method.deploy(state)
        return {size: evaluation.total(self.runner.evaluate(state, size)) for size in sizes}

    def validate(self, state: State, rows: Mapping[str, Tensor]) -> dict[str, Score]:
        """Score deployed models, each on some training samples, given by their numbers."""
        return {
            size: evaluation.total(self.runner.evaluate(state, size, rows=own))
            for size, own in rows.items()
        }

    def close(self) -> None:
        """Nothing to let go of."""
