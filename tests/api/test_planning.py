"""Planning and advice from Python: as the commands have them, with models in memory."""

import pytest
from torch import nn

import sizewise
from sizewise.errors import ConfigError
from sizewise.report import advice

TASK = {"budgets": ["30kB", "1MB"], "fleet": {"devices": 6, "per_round": 3}, "rounds": 2}
DATA = {"train_limit": 200, "test_limit": 40}


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def test_advice_is_that_of_the_command() -> None:
    found = sizewise.advise("linear", "digits", **TASK, data_options=DATA, patience=2)
    table = {"rounds": 2, "model": {"name": "linear"}, "data": {"name": "digits", **DATA}}
    fleet = {**TASK["fleet"], "budgets": TASK["budgets"]}
    named = advice.advise({**table, "fleet": fleet}, patience=2)
    best = named.recommended
    assert best is not None
    assert (found.method, found.levers, found.reason) == (best.method, best.levers, named.reason())
    assert found.reason in repr(found)
    frame = found.frame()
    assert frame["method"][0] == found.advice.fits[0].method
    assert {"reach", "peak", "sent", "flops", "untrained"} <= set(frame.columns)


def test_a_model_in_memory_is_advised_on() -> None:
    found = sizewise.advise(network, "digits", **TASK, data_options=DATA, patience=0)
    assert found.advice.whole == sizewise.plan(network, "digits", **TASK).rows[1]["predicted"]


def test_options_of_a_method_are_refused() -> None:
    with pytest.raises(ConfigError, match="no method_options"):
        sizewise.advise("linear", method_options={"widths": [0.5]})
