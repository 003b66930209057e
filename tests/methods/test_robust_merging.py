"""Every method that merges weights merges them by the recipe's rule."""

from pathlib import Path
from typing import Any

import pytest

from sizewise import config as configs
from sizewise.errors import ConfigError
from sizewise.runs import catalogue, session

WHOLE = ("flexlora", "flora", "hetlora")
"""Merge both factors of an adapter at once, and refuse rules for single entries."""

MERGING = sorted(set(catalogue.names("methods")) - {"fedgkt", "local", *WHOLE})


def largest(path: Path, method: str, rule: str) -> float:
    """Return the largest number in the model after a round in which one device sends huge ones."""
    tables: dict[str, Any] = {
        "rounds": 1,
        "model": {"name": "cnn", "args": {"layers": [4, 4, 4]}},
        "data": {"train_limit": 80, "test_limit": 20},
        "fleet": {
            "devices": 5,
            "per_round": 5,
            "ratios": [2.0],
            "attack": [{"kind": "scaling", "strength": 1e6, "count": 1}],
        },
        "method": {"name": method},
        "recipe": {"merge": rule, "batch": 8, "lr": 0.01, "server_lr": 1.0, "server": "fedavg"},
    }
    with session.started(configs.from_dict(tables), path) as federation:
        federation.run()
        state, _ = federation.folder.restore() or (None, None)
    assert state is not None
    floats = (t for t in state.tensors.values() if t.is_floating_point())
    return max(float(tensor.abs().max()) for tensor in floats)


@pytest.mark.parametrize("method", MERGING)
def test_one_device_cannot_decide(method: str, tmp_path: Path) -> None:
    assert largest(tmp_path / "mean", method, "mean") > 100
    assert largest(tmp_path / "median", method, "median") < 10


@pytest.mark.parametrize("method", WHOLE)
def test_methods_that_merge_products_say_so(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="merges both factors of an adapter at once"):
        largest(tmp_path / "median", method, "median")
    assert not list(tmp_path.iterdir())
