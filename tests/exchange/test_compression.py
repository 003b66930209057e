"""Updates in fewer bytes: what comes back, what is remembered, what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sizewise.errors import ConfigError, UpdateRefused
from sizewise.exchange import compression
from sizewise.exchange.plan import Plan, Submodel, TrainingStage, Update
from sizewise.exchange.view import size_in_bytes, whole
from sizewise.steps.recipe import Recipe

KINDS = ("bf16", "int8", "topk")


@dataclass(frozen=True)
class Half(Submodel):
    """A part of the model."""

    width: float = 0.5


BASE = {"a": torch.zeros(4, 5), "n": torch.tensor(3)}
PLAN = Plan(0, 0, "all", Submodel(), (TrainingStage(0.1, 1),))


def update_of(change: Tensor, **more: Any) -> Update:
    trained = {"a": BASE["a"] + change, "n": torch.tensor(4)}
    return Update(PLAN, trained, samples=5, steps=1, loss=0.5, **more)


def sent_and_back(kind: str, change: Tensor, state: dict[str, Tensor]) -> tuple[Update, Update]:
    recipe = Recipe(upload=kind)  # type: ignore[arg-type]
    sent = compression.encoded(update_of(change), BASE, state, recipe)
    return sent, compression.decoded(sent, whole(BASE), BASE, recipe)


def test_off_by_default() -> None:
    update = update_of(torch.ones(4, 5))
    assert compression.encoded(update, BASE, {}, Recipe()) is update
    assert compression.decoded(update, whole(BASE), BASE, Recipe()) is update
    assert compression.kept(BASE, Recipe()) == {}


def test_toy_numbers() -> None:
    change = torch.zeros(4, 5)
    change[0, 1], change[2, 3], change[3, 3] = -1.27, 0.504, 0.01
    sent, back = sent_and_back("int8", change, {})
    assert sent.tensors["a#change"].dtype == torch.int8
    assert sent.tensors["a#change"][2, 3] == 50
    assert back.tensors["a"][0, 1].item() == pytest.approx(-1.27)
    assert back.tensors["a"][2, 3].item() == pytest.approx(0.50)
    assert back.tensors["n"] == 4, "whole numbers travel as they are"
    sent, back = sent_and_back("topk", change, {})
    assert sent.tensors["a#place"].tolist() == [1, 13]
    assert back.tensors["a"].count_nonzero() == 2
    assert back.tensors["a"][2, 3].item() == pytest.approx(0.504)


@pytest.mark.parametrize(("kind", "expected"), [("bf16", 48), ("int8", 32), ("topk", 24)])
def test_bytes(kind: str, expected: int) -> None:
    sent, back = sent_and_back(kind, torch.randn(4, 5), {})
    assert size_in_bytes(sent.tensors) == expected
    assert size_in_bytes(back.tensors) == 88


@given(seed=st.integers(0, 99), kind=st.sampled_from(["int8", "topk"]))
def test_what_is_left_out_is_sent_in_the_end(seed: int, kind: str) -> None:
    """The sum of what was sent and what is remembered is the sum of the changes."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {"other": torch.ones(1)}
    made, came = torch.zeros(4, 5), torch.zeros(4, 5)
    for _ in range(5):
        change = torch.randn(4, 5, generator=generator)
        sent, back = sent_and_back(kind, change, state)
        made, came = made + change, came + back.tensors["a"] - BASE["a"]
        state = dict(sent.device_state)
    (missed,) = state.values()
    assert torch.allclose(made, came + missed, atol=1e-5)


def test_what_is_remembered_is_for_one_submodel_and_not_for_the_method() -> None:
    recipe, change = Recipe(upload="topk"), torch.arange(20.0).reshape(4, 5)
    own = {"momentum": torch.ones(1)}
    first = compression.encoded(update_of(change, device_state=own), BASE, {}, recipe)
    assert compression.own_state(first.device_state) == own
    assert len(first.device_state) == 2

    # Another part of the model, under the same names: nothing of the first is added to it.
    moved = replace(update_of(change), plan=replace(PLAN, submodel=Half()))
    fresh = compression.encoded(moved, BASE, {}, recipe)
    after = compression.encoded(moved, BASE, first.device_state, recipe)
    assert torch.equal(after.tensors["a#change"], fresh.tensors["a#change"])


def test_rows_of_a_tensor() -> None:
    for kind in KINDS:
        recipe = Recipe(upload=kind)  # type: ignore[arg-type]
        base = {"a": torch.arange(20.0).reshape(4, 5)}
        change = torch.tensor([[1.0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
        trained = {"a": base["a"][[3, 1]] + change}
        update = Update(PLAN, trained, samples=5, steps=1, loss=0.5, rows={"a": [3, 1]})
        sent = compression.encoded(update, base, {}, recipe)
        back = compression.decoded(sent, whole(base), base, recipe)
        assert torch.equal(back.tensors["a"], trained["a"]), kind
        assert not sent.device_state


Change = Callable[[dict[str, Tensor]], Any]
HOSTILE: dict[str, tuple[str, Change, str]] = {
    "raw": ("int8", lambda held: held.update({"a": held.pop("a#change").float()}), "came as"),
    "a part too few": ("int8", lambda held: held.pop("a#scale"), "expected ['change', 'scale']"),
    "a part too many": ("bf16", lambda held: held.update({"a#x": torch.ones(1)}), "came as"),
    "of another tensor": ("bf16", lambda held: held.update({"b#change": torch.ones(1)}), "never"),
    "whole numbers in parts": ("bf16", lambda held: held.update({"n#change": held["n"]}), "came"),
    "another type": ("bf16", lambda held: held.update({"a#change": torch.zeros(4, 5)}), "expected"),
    "another shape": (
        "int8",
        lambda held: held.update({"a#change": torch.zeros(2, 5, dtype=torch.int8)}),
        "expected torch.int8 of shape (4, 5)",
    ),
    "an infinite scale": (
        "int8",
        lambda held: held.update({"a#scale": torch.tensor([float("inf")])}),
        "its scale is inf",
    ),
    "a scale that is none": (
        "int8",
        lambda held: held.update({"a#scale": torch.tensor([float("nan")])}),
        "its scale is nan",
    ),
    "a negative scale": (
        "int8",
        lambda held: held.update({"a#scale": torch.tensor([-1.0])}),
        "its scale is -1.0",
    ),
    "more places": (
        "topk",
        lambda held: held.update({"a#place": torch.arange(20, dtype=torch.int32)}),
        "expected torch.int32 of shape (2,)",
    ),
    "a place twice": ("topk", lambda held: held["a#place"].fill_(3), "not distinct places"),
    "a place outside": ("topk", lambda held: held["a#place"].add_(19), "not distinct places"),
    "a negative place": ("topk", lambda held: held["a#place"].sub_(20), "not distinct places"),
    "places in disorder": (
        "topk",
        lambda held: held["a#place"].copy_(held["a#place"].flip(0)),
        "not distinct places",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_update_is_refused(name: str) -> None:
    kind, change, reason = HOSTILE[name]
    recipe = Recipe(upload=kind)  # type: ignore[arg-type]
    sent = compression.encoded(update_of(torch.randn(4, 5)), BASE, {}, recipe)
    held = {key: tensor.clone() for key, tensor in sent.tensors.items()}
    change(held)
    with pytest.raises(UpdateRefused, match=r".+") as error:
        compression.decoded(replace(sent, tensors=held), whole(BASE), BASE, recipe)
    assert reason in str(error.value)


def test_shares_that_save_nothing_are_refused() -> None:
    for share in (0, -0.1, 0.51):
        with pytest.raises(ConfigError, match="upload_share"):
            Recipe(upload="topk", upload_share=share)
