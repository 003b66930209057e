"""Epsilon, against another library's accountants and by its own rules."""

import warnings

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant

from sizewise.errors import ConfigError
from sizewise.privacy import accounting
from sizewise.privacy.accounting import epsilon, smallest_noise

SETTINGS = [(0.01, 1.0, 1000, 1e-5), (0.1, 1.5, 100, 1e-5), (0.25, 1.2, 20, 1e-3)]
"""Rate, noise multiplier, rounds, delta."""


@pytest.mark.parametrize(("rate", "noise", "rounds", "delta"), SETTINGS)
def test_epsilon_is_that_of_opacus_to_one_percent(
    rate: float, noise: float, rounds: int, delta: float
) -> None:
    renyi, losses = RDPAccountant(), PRVAccountant()
    renyi.history = losses.history = [(noise, rate, rounds)]
    spent = {(rate, noise): rounds}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of orders at the end of its list.
        assert epsilon(spent, delta, "rdp") == pytest.approx(renyi.get_epsilon(delta), rel=0.01)
        theirs = losses.get_epsilon(delta=delta)
    assert epsilon(spent, delta, "pld") == pytest.approx(theirs, rel=0.01)


def test_rounds_of_different_rates_compose() -> None:
    renyi = RDPAccountant()
    renyi.history = [(1.0, 0.1, 10), (2.0, 0.3, 5)]
    spent = {(0.1, 1.0): 10, (0.3, 2.0): 5}
    assert epsilon(spent, 1e-5, "rdp") == pytest.approx(renyi.get_epsilon(1e-5), rel=0.01)


def test_one_gaussian_release_by_its_closed_form() -> None:
    # Balle and Wang (2018): delta of a Gaussian mechanism; at z = 1 and epsilon 1 it is 0.12694.
    assert epsilon({(1.0, 1.0): 1}, 0.126937, "pld") == pytest.approx(1.0, rel=2e-3)


def test_nothing_was_released_and_nothing_is_spent() -> None:
    assert epsilon({}, 1e-5) == 0


def test_loss_distributions_never_give_more_than_renyi() -> None:
    for noise in (0.6, 1.0, 2.0):
        spent = {(0.2, noise): 10}
        assert epsilon(spent, 1e-5, "pld") <= epsilon(spent, 1e-5, "rdp")


def test_where_epsilon_promises_nothing_it_is_a_bound_all_the_same() -> None:
    spent = {(0.2, 0.2): 10}
    assert epsilon(spent, 1e-5, "pld") >= epsilon(spent, 1e-5, "rdp") > accounting.LARGE


def test_the_noise_of_a_target_just_meets_it() -> None:
    def spent(noise: float) -> float:
        return epsilon({(0.1, noise): 50}, 1e-5, "rdp")

    found = smallest_noise(spent, 2.0)
    assert spent(found) <= 2.0 < spent(found * 0.998)


def test_a_target_that_no_noise_meets_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"no noise keeps all rounds within privacy\.epsilon = 1;"
    ):
        smallest_noise(lambda noise: 3.0, 1.0)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'sizewise\[privacy\]'"):
        accounting.epsilon({(0.1, 1.0): 1}, 1e-5)
