import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.data.dataset import Dataset
from sizewise.training.evaluation import Score, batch_count, score, total


def toy_data(images: Tensor, labels: Tensor) -> Dataset:
    return Dataset("toy", images, labels, images, labels, ("a", "b", "c"), (0.0,), (1.0,))


class Brightest(nn.Module):
    """Logits are the first three pixels; remembers how large its batches were."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(len(images))
        return images.flatten(1)[:, :3]


def test_score_by_hand() -> None:
    images = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    images[0, 0, 0, 0] = images[1, 0, 0, 1] = images[2, 0, 0, 1] = 255
    labels = torch.tensor([0, 1, 2])
    (result,) = score(Brightest(), toy_data(images, labels), 10)
    logits = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0]])
    assert (result.counts, result.samples) == ((2, 3), 3)
    assert result.values("accuracy")[0] == pytest.approx(2 / 3)
    assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item())


def test_scores_add_up() -> None:
    assert total([Score((1, 2), 0.5, 2), Score((3, 4), 1.5, 4)]) == Score((4, 6), 2.0, 6)


@given(st.integers(1, 500), st.integers(1, 60))
@example(50, 20)
@example(30, 20)
def test_last_batch_of_less_than_half_joins_the_one_before(samples: int, batch: int) -> None:
    model = Brightest()
    images = torch.zeros(samples, 1, 2, 2, dtype=torch.uint8)
    score(model, toy_data(images, torch.zeros(samples, dtype=torch.int64)), batch)
    rest = samples % batch
    expected = [batch] * (samples // batch)
    if rest and (2 * rest >= batch or not expected):
        expected.append(rest)
    else:
        expected[-1] += rest
    assert model.sizes == expected
    assert batch_count(samples, batch) == len(expected)


def test_chosen_batches_are_those_of_the_whole(dataset: Dataset) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3))
    everything = score(model, dataset, 4)
    assert len(everything) == 3
    assert [*score(model, dataset, 4, [2]), *score(model, dataset, 4, [0, 1])] == [
        everything[2],
        *everything[:2],
    ]


def test_scoring_is_in_evaluation_mode_and_without_gradients(dataset: Dataset) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = model[2].running_mean.clone()
    results = [score(model.train(), dataset, 6) for _ in range(2)]
    assert results[0] == results[1]
    assert torch.equal(model[2].running_mean, before)
    assert model[1].weight.grad is None


def test_rows_of_the_training_set_by_hand() -> None:
    images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    images[0, 0, 0, 0] = images[1, 0, 0, 1] = images[3, 0, 0, 1] = 255
    data = toy_data(images, torch.tensor([0, 1, 2, 2]))
    rows = torch.tensor([3, 0, 1])
    parts = score(Brightest(), data, 2, rows=rows)
    assert [part.samples for part in parts] == [2, 1]
    found = total(parts)
    assert (found.counts, found.right, found.asked) == ((2, 3), (0, 1, 1), (1, 1, 1))
    assert score(Brightest(), data, 2, [1], rows)[0] == parts[1]
