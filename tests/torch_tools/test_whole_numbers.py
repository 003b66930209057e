"""Whole numbers are known without data where they depend on shapes, and made up where not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sizewise.torch_tools.dry_run import MetaMode

IDS = torch.empty(2, 5, dtype=torch.int64, device="meta")


def counted(length: int) -> Tensor:
    return torch.arange(length, device="meta")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda: (counted(5).diff() == 1).all(), True),
        (lambda: counted(5).cumsum(0)[-1], 10),
        (lambda: counted(5).expand(2, 5)[:, 1:].max(), 4),
        (lambda: counted(6).view(2, 3).mul_(2).add_(1)[1, 2], 11),
        (lambda: torch.equal(counted(3), counted(3)), True),
    ],
)
def test_what_is_counted_is_known(question: Callable[[], Tensor], answer: int) -> None:
    with MetaMode() as mode:
        found = question()
        assert (found if isinstance(found, bool) else found.item()) == answer
    assert not mode.numbers.guessed


def test_a_view_changes_with_its_tensor() -> None:
    with MetaMode():
        numbers = counted(4)
        tail = numbers[2:]
        numbers.add_(10)
        assert tail[0].item() == 12


def test_numbers_that_have_data_change_once() -> None:
    counter = torch.tensor(3)
    with MetaMode():
        counter.add_(1)
        assert counter.item() == 4


@pytest.mark.parametrize("token", [0, 1])
def test_token_ids_are_made_up(token: int) -> None:
    with MetaMode() as mode:
        mode.numbers.made_up = token
        assert (1 in IDS[:, [0, -1]]) == bool(token)
    assert mode.numbers.guessed


@pytest.mark.parametrize("answer", [0, 1])
def test_what_is_asked_about_token_ids_is_answered_both_ways(answer: int) -> None:
    with MetaMode() as mode:
        mode.numbers.made_up = answer
        assert bool((IDS == 7).any()) == bool(answer)
        with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
            IDS.max().item()


def test_what_depends_on_features_is_not_known() -> None:
    features = torch.empty(2, 5, device="meta")
    with MetaMode(), pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
        (features > 0).any().item()
    with MetaMode():
        numbers = counted(5)
        numbers.add_(features.argmax())
        with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
            numbers[0].item()
