import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sizewise.data.silos import join
from sizewise.errors import DataError
from sizewise.steps.label_sets import divide, own_head
from sizewise.steps.step import IGNORED, compare
from text_cases import text_dataset


def test_each_target_meets_the_head_of_its_own_set() -> None:
    outputs = torch.arange(12.0).view(2, 3, 2)  # Two samples, three sets of two classes.
    own, targets = own_head(outputs, torch.tensor([3, 4]))
    assert own.tolist() == [[2, 3], [10, 11]]
    assert targets.tolist() == [1, 0]


def test_other_heads_do_not_learn() -> None:
    outputs = torch.randn(2, 4, 3, 2, requires_grad=True)
    targets = torch.tensor([[IGNORED, 2, 3, 2], [5, 4, IGNORED, 5]])
    compare(outputs, targets).backward()
    learned = outputs.grad.abs().amax(-1) > 0
    expected = torch.zeros(2, 4, 3, dtype=torch.bool)
    expected[0, 1:, 1] = expected[1, [0, 1, 3], 2] = True
    assert torch.equal(learned, expected)


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=8))
def test_loss_is_the_mean_over_the_sets_own_losses(labels: list[int]) -> None:
    targets = torch.tensor([IGNORED if label < 0 else label for label in labels])[:, None]
    outputs = torch.randn(len(labels), 1, 2, 3)
    losses = [
        torch.nn.functional.cross_entropy(
            outputs[i, 0, label // 3][None], torch.tensor([label % 3])
        )
        for i, label in enumerate(labels)
        if label >= 0
    ]
    if losses:
        torch.testing.assert_close(compare(outputs, targets), torch.stack(losses).mean())


def test_samples_are_divided_by_their_set() -> None:
    outputs, targets = torch.randn(3, 2, 2, 3), torch.tensor([[4, IGNORED], [0, 2], [3, 5]])
    first, second = divide(outputs, targets, 2)
    assert torch.equal(first[0], outputs[[1], :, 0])
    assert first[1].tolist() == [[0, 2]]
    assert torch.equal(second[0], outputs[[0, 2], :, 1])
    assert second[1].tolist() == [[1, IGNORED], [0, 2]]
    ((same, labels),) = divide(outputs[:, :, 0], targets, 1)
    assert torch.equal(same, outputs[:, :, 0])
    assert labels is targets


def test_silos_are_joined() -> None:
    tags = text_dataset("tags")
    fewer = text_dataset("tags")
    joined = join([tags, fewer])
    assert joined.silos == ("toy texts", "toy texts")
    assert (joined.sets, joined.classes) == (2, 6)
    assert joined.names(1) == ("O", "B-X", "I-X")
    half = len(tags.train_labels)
    assert torch.equal(joined.train_labels[:half], tags.train_labels)
    moved = joined.train_labels[half:]
    assert torch.equal(moved[moved != IGNORED], tags.train_labels[tags.train_labels >= 0] + 3)
    assert joined.groups is not None
    assert joined.groups.tolist() == [0] * half + [1] * half
    with pytest.raises(DataError, match="silos need samples of one shape and the same kind"):
        join([tags, text_dataset("class")])
