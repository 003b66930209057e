import inspect

import pytest

from sizewise import errors
from sizewise.errors import BudgetTooSmall, SizewiseError
from sizewise.memory.meter import OutOfBudget

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
CODES = {
    "BudgetTooSmall": 3,
    "NobodyCanTrain": 3,
    "NothingMerged": 3,
    "EngineError": 1,
    "TooFewUpdates": 1,
}


@pytest.mark.parametrize("kind", [*KINDS, OutOfBudget], ids=lambda kind: kind.__name__)
def test_every_error_is_ours_and_has_its_exit_code(kind: type[SizewiseError]) -> None:
    assert issubclass(kind, SizewiseError)
    assert kind.exit_code == CODES.get(kind.__name__, 2)


def test_budget_too_small_says_what_would_do() -> None:
    error = BudgetTooSmall(1000, 2500, "one training step of the full model")
    assert str(error) == (
        "one training step of the full model needs 2,500 bytes, the device has 1,000; "
        "give it at least 2,500 bytes or choose a method that trains smaller submodels"
    )
    assert (error.budget, error.needed) == (1000, 2500)
