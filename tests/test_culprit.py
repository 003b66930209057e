"""The layer that was at work is named, if there was one."""

import pytest
from torch import nn

from sizewise.culprit import blame


class Inner(nn.Module):
    def forward(this, x: object) -> object:  # noqa: N805
        raise KeyError(x)


def caught(module: nn.Module, x: object) -> Exception:
    with pytest.raises(KeyError) as info:
        module(x)
    return info.value


def test_the_innermost_layer_is_named() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(Inner()))
    assert blame(caught(model, "a"), model) == "layer '1.0', a Inner: KeyError: 'a'"
    # Somebody else's layers have no name here, nor has the whole model.
    assert blame(caught(model, "a"), nn.Linear(1, 1)) == "KeyError: 'a'"
    assert blame(caught(model[1][0], "a"), model[1][0]) == "KeyError: 'a'"
    assert blame(caught(model, "a"), nn.Linear(1, 1), model).startswith("layer '1.0'")


def test_reasons_are_one_line() -> None:
    model = nn.Identity()
    assert blame(ValueError(" two words \n and more"), model) == "two words"
    assert blame(AssertionError(), model) == "AssertionError"
    assert blame(IndexError("7"), model) == "IndexError: 7"
