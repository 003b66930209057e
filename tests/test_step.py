import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.step import backpropagate, cross_entropy, masked_cross_entropy, training_step

LABELS = torch.tensor([0, 2, 2, 0])


def model() -> nn.Linear:
    return nn.Linear(5, 4)


def test_masked_logits_count_as_zero_and_get_no_gradient() -> None:
    module, images = model(), torch.randn(4, 5)
    loss = masked_cross_entropy(module, images, LABELS, torch.tensor([0, 2]))
    logits = module(images).detach()
    # The two other classes add exp(0) = 1 each.
    total = logits[:, 0].exp() + logits[:, 2].exp() + 2
    torch.testing.assert_close(loss, (total.log() - logits[range(4), LABELS]).mean())
    loss.backward()
    assert module.weight.grad is not None
    assert module.bias.grad is not None
    assert (module.weight.grad[[1, 3]] == 0).all()
    assert (module.bias.grad[[1, 3]] == 0).all()
    assert (module.weight.grad[[0, 2]] != 0).all()


def test_classes_of_the_batch_are_the_default() -> None:
    module, images = model(), torch.randn(4, 5)
    by_batch = masked_cross_entropy(module, images, LABELS)
    assert torch.equal(by_batch, masked_cross_entropy(module, images, LABELS, LABELS.unique()))
    assert not torch.equal(by_batch, cross_entropy(module, images, LABELS))


def test_all_classes_are_no_mask() -> None:
    module, images = model(), torch.randn(4, 5)
    masked = masked_cross_entropy(module, images, LABELS, torch.arange(4))
    assert torch.equal(masked, cross_entropy(module, images, LABELS))


def test_terms_add_up_as_if_they_were_one_loss() -> None:
    module, images = model(), torch.randn(4, 5)

    def terms() -> Iterator[Tensor]:
        yield F.cross_entropy(module(images), LABELS)
        yield module(images).square().mean()
        yield module.weight.abs().sum()

    value = backpropagate(terms())
    assert not value.requires_grad
    found = [p.grad for p in module.parameters()]
    total = torch.stack(list(terms())).sum()
    expected = torch.autograd.grad(total, list(module.parameters()))
    torch.testing.assert_close(found, list(expected))
    torch.testing.assert_close(value, total.detach())


def test_a_term_is_gone_before_the_next_is_computed() -> None:
    module, images = model(), torch.randn(4, 5)
    made: list[weakref.ref[Tensor]] = []

    def term() -> Tensor:
        value = module(images).square().sum()
        made.append(weakref.ref(value))
        return value

    def terms() -> Iterator[Tensor]:
        yield term()
        assert made[0]() is None
        yield term()

    backpropagate(terms())
    assert len(made) == 2


def test_step_reports_the_sum_of_its_terms() -> None:
    module, images = model(), torch.randn(4, 5)
    before = cross_entropy(module, images, LABELS).item()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def twice(module: nn.Module, images: Tensor, labels: Tensor) -> Iterator[Tensor]:
        yield cross_entropy(module, images, labels)
        yield cross_entropy(module, images, labels)

    value = training_step(module, optimizer, images, LABELS, loss=twice)
    torch.testing.assert_close(value.item(), 2 * before)
