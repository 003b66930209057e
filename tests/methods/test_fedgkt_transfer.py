"""Knowledge transfer: samples keep their teacher's logits, and the losses by hand."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.data.augment import Transform
from sizewise.methods.fedgkt.transfer import Gathered, Pupil, distance, pupils_loss, teachers_loss


def pupil(logits: Tensor | None) -> Pupil:
    # The value of each pixel is the number of its image; labels are three times that.
    images = torch.arange(20, dtype=torch.uint8).reshape(20, 1, 1, 1).expand(-1, 1, 2, 2)
    rows = torch.tensor([3, 14, 15, 9, 2, 6, 5])
    transform = Transform("none", (0.0,), (1 / 255,))
    return Pupil(images, 3 * torch.arange(20), rows, transform, logits)


def test_teacher_logits_are_matched_by_sample() -> None:
    learner = pupil(None)
    # The server answers in the order in which the samples came: row n is for sample n.
    logits = torch.stack([learner.rows, learner.rows + 0.5], dim=1)
    learner = pupil(logits)
    generator, orders = torch.Generator().manual_seed(0), []
    for _ in range(3):
        seen = []
        for (images, taught), labels in learner.batches(2, generator):
            numbers = images[:, 0, 0, 0].round()
            torch.testing.assert_close(taught, torch.stack([numbers, numbers + 0.5], dim=1))
            torch.testing.assert_close(labels, 3 * numbers.long())
            seen += numbers.tolist()
        orders.append(tuple(seen))
    assert len(set(orders)) == 3, "each epoch has an order of its own"


def test_without_a_teacher_batches_are_those_of_the_shard() -> None:
    learner = pupil(None)
    ours = list(learner.batches(3, torch.Generator().manual_seed(1)))
    theirs = list(learner._numbered.batches(3, torch.Generator().manual_seed(1)))
    assert [len(inputs) for inputs, _ in ours] == [1, 1]
    for ((images,), _), (expected, _) in zip(ours, theirs, strict=True):
        assert torch.equal(images, expected)


@pytest.mark.parametrize("count", [1, 4, 5, 6, 9])
def test_the_server_answers_for_every_sample_under_its_number(count: int) -> None:
    features = torch.arange(float(count))[:, None]
    labels = torch.zeros(count, dtype=torch.int64)
    told = Gathered(features, torch.zeros(count, 2), labels, chunks=(count,))
    sizes, numbers = [], []
    for (rows, _, answer), labels in told.batches(4, torch.Generator().manual_seed(0)):
        answer(torch.cat([rows, -rows], dim=1))
        sizes.append(len(labels))
        numbers += rows[:, 0].tolist()
    assert torch.equal(told.answers, torch.cat([features, -features], dim=1))
    assert sorted(numbers) == list(range(count))
    assert count == 1 or min(sizes) > 1


def test_one_devices_samples_come_after_the_others() -> None:
    features = torch.arange(9.0)[:, None]
    told = Gathered(features, torch.zeros(9, 2), torch.zeros(9, dtype=torch.int64), chunks=(2, 7))
    batches = told.batches(3, torch.Generator().manual_seed(0))
    numbers = [rows[:, 0].tolist() for (rows, _, _), _ in batches]
    assert [sorted(number) for number in numbers[:1]] == [[0, 1]]
    assert [len(number) for number in numbers] == [2, 4, 3]
    assert sorted(numbers[1] + numbers[2]) == [2, 3, 4, 5, 6, 7, 8]


def test_the_distance_by_hand() -> None:
    # At T = 2: softmax(0, ln 9 / 2) = (1/4, 3/4); the student guesses (1/2, 1/2).
    teacher, student = torch.tensor([[0.0, math.log(9)]]), torch.zeros(1, 2)
    expected = 4 * (0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert float(distance(student, teacher, 2.0)) == pytest.approx(expected, abs=1e-5)


class Given(nn.Module):
    """Has these logits, whatever comes in."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits


def test_losses_of_both_sides() -> None:
    torch.manual_seed(0)
    own, other, labels = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 3, 1])
    model, images = Given(own), torch.zeros(3, 1)
    entropy, apart = F.cross_entropy(own, labels), distance(own, other, 3.0)

    def pupils(*inputs: Tensor) -> Tensor:
        return pupils_loss(model, inputs, labels, alpha=0.5, temperature=3.0)

    torch.testing.assert_close(pupils(images), entropy)
    torch.testing.assert_close(pupils(images, other), entropy + 0.5 * apart)
    answers: list[Tensor] = []
    for distil, expected in ((False, entropy), (True, apart + 0.5 * entropy)):
        loss = teachers_loss(
            model, (images, other, answers.append), labels, 0.5, 3.0, distil=distil
        )
        torch.testing.assert_close(loss, expected)
        assert torch.equal(answers[-1], own)
        assert not answers[-1].requires_grad
