from typing import Any

import pytest
import torch

from sizewise.errors import UpdateRefused
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.rows import with_rows
from sizewise.exchange.view import TensorSlice, check, cut

TENSORS = {
    "head.weight": torch.arange(12.0).reshape(4, 3),
    "head.bias": torch.arange(4.0),
    "hidden.weight": torch.zeros(6, 2),
    "picked.weight": torch.zeros(6, 2),
    "counter": torch.tensor(3),
}
VIEW = {
    "weight": TensorSlice("head.weight", (slice(None), slice(0, 2))),
    "bias": TensorSlice("head.bias"),
    "hidden": TensorSlice("hidden.weight", (slice(0, 3), slice(None))),
    "picked": TensorSlice("picked.weight", (torch.tensor([0, 2, 5]), slice(None))),
    "counter": TensorSlice("counter"),
}


def test_rows_narrow_the_first_dimension_and_leave_the_others() -> None:
    narrowed = with_rows(VIEW, {"weight": [3, 1], "bias": [3, 1]}, TENSORS)
    found = cut(TENSORS, narrowed)
    assert found["weight"].tolist() == [[9, 10], [3, 4]]
    assert found["bias"].tolist() == [3, 1]
    assert narrowed["hidden"] is VIEW["hidden"]
    assert narrowed.keys() == VIEW.keys()


def test_without_rows_it_is_the_same_view() -> None:
    assert with_rows(VIEW, {}, TENSORS) == VIEW


def test_only_the_rows_that_were_sent_are_merged() -> None:
    narrowed = with_rows(VIEW, {"weight": [2, 0]}, TENSORS)
    update = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    check(update, narrowed, TENSORS)
    mean = CoverageMean(TENSORS)
    mean.add(update, narrowed, 2.0)
    assert mean.result()["head.weight"].tolist() == [[3, 4, 2], [3, 4, 5], [1, 2, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    "rows",
    [[], [0, 0], [4], [-1], [True], [1, False], [1.0], ["1"], [None], [[0]], "01", 1, None, {}],
    ids=repr,
)
def test_rows_that_are_not_distinct_rows_are_refused(rows: Any) -> None:
    with pytest.raises(UpdateRefused, match=r"of 'bias' came, expected distinct rows of 4") as e:
        with_rows(VIEW, {"bias": rows}, TENSORS)
    assert "\n" not in str(e.value)


def test_rows_of_an_unknown_tensor_are_refused() -> None:
    with pytest.raises(UpdateRefused, match=r"rows of 'head\.bias' came, .* never sent"):
        with_rows(VIEW, {"head.bias": [0]}, TENSORS)


@pytest.mark.parametrize("name", ["hidden", "picked", "counter"])
def test_tensors_whose_rows_the_device_has_not_all_are_refused(name: str) -> None:
    with pytest.raises(UpdateRefused, match=f"the rows \\[0\\] of '{name}' came"):
        with_rows(VIEW, {name: [0]}, TENSORS)


def test_long_lists_make_no_long_message() -> None:
    with pytest.raises(UpdateRefused) as caught:
        with_rows(VIEW, {"bias": list(range(100_000))}, TENSORS)
    assert len(str(caught.value)) < 200


def test_values_must_fit_the_rows() -> None:
    narrowed = with_rows(VIEW, {"bias": [1, 2]}, TENSORS)
    with pytest.raises(UpdateRefused, match=r"expected torch\.float32 of shape \(2,\)"):
        check({"bias": torch.zeros(4)}, narrowed, TENSORS)
