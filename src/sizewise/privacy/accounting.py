"""What rounds spend together: epsilon from the accountants of `dp-accounting`.

A round is a Gaussian mechanism of multiplier z on the updates of devices that are each asked with
probability q, by themselves (Poisson sampling). Two fleets are neighbours if one device's update is
there in one and 0 in the other. Rounds compose, for each device with its own rates.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sizewise.errors import ConfigError
from sizewise.privacy.config import Accountant

Spending = Mapping[tuple[float, float], int]
"""How many rounds a device was asked in at a rate q, hidden by a multiplier z, by (q, z)."""

FINE = 1e-3
"""The grid of privacy losses; they are rounded up, so epsilon is never too small."""

LARGE = 50.0
"""Beyond this, epsilon promises nothing, and loss distributions take long: Renyi's will do."""


def epsilon(spending: Spending, delta: float, accountant: Accountant = "pld") -> float:
    """Return what rounds have spent.

    Args:
        spending: The rounds.
        delta: The probability that goes with it.
        accountant: Who adds up.
    """
    if not spending:
        return 0.0
    library = _library()
    with _quiet():
        if accountant == "rdp":
            return _total(library.rdp.RdpAccountant(), spending, delta)
        # Whole orders take a tenth of the time, and give an upper bound, too.
        rough = _total(library.rdp.RdpAccountant(range(2, 65)), spending, delta)
        if rough > LARGE:
            return rough
        losses = library.pld.PLDAccountant(value_discretization_interval=FINE)
        return min(rough, _total(losses, spending, delta))


def _total(accountant: Any, spending: Spending, delta: float) -> float:
    library = _library()
    for (rate, noise), rounds in spending.items():
        event = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
        accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))


def smallest_noise(spent: Callable[[float], float], target: float) -> float:
    """Return the smallest noise multiplier, to 0.1 %, with which a run stays within its epsilon.

    Args:
        spent: From a multiplier to the epsilon of all rounds.
        target: The largest epsilon.
    """
    low, high = 0.0, 1.0
    while spent(high) > target:
        low, high = high, 2 * high
        if high > 1e6:
            raise ConfigError(
                f"no noise keeps all rounds within privacy.epsilon = {target:g}; raise it or "
                f"privacy.delta, or lower rounds or fleet.per_round"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > target else (low, middle)
    return high


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise ConfigError(
            "[privacy] needs dp-accounting to add up what rounds spend; "
            "pip install 'sizewise[privacy]'"
        ) from None
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the accountants' remarks about orders that they pass over off the screen."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
