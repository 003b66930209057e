import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.steps.step import backpropagate, cross_entropy, masked_cross_entropy, training_step

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


def test_padding_is_no_tag_and_masks_what_the_device_lacks() -> None:
    module, inputs = nn.Linear(5, 4), torch.randn(2, 3, 5)
    tags = torch.tensor([[1, -100, 3], [3, 1, -100]])
    loss = masked_cross_entropy(module, inputs, tags)
    logits = module(inputs).detach()
    terms = []
    for text, token in ((0, 0), (0, 2), (1, 0), (1, 1)):  # All but the padding.
        own = logits[text, token, [1, 3]]
        total = own.exp().sum() + 2  # Tags 0 and 2 are absent: exp(0) each.
        terms.append(total.log() - logits[text, token, tags[text, token]])
    torch.testing.assert_close(loss, torch.stack(terms).mean())
    loss.backward()
    assert module.bias.grad is not None
    assert (module.bias.grad != 0).tolist() == [False, True, False, True]


def test_each_label_set_is_masked_by_its_own_labels() -> None:
    module, inputs = nn.Sequential(nn.Linear(5, 6), nn.Unflatten(-1, (2, 3))), torch.randn(3, 5)
    labels = torch.tensor([0, 2, 4])  # Two of the first set, one of the second.
    loss = masked_cross_entropy(module, inputs, labels)
    logits = module(inputs).detach()
    first = [
        (logits[n, 0, 0].exp() + logits[n, 0, 2].exp() + 1).log() - logits[n, 0, label]
        for n, label in ((0, 0), (1, 2))
    ]
    second = (logits[2, 1, 1].exp() + 2).log() - logits[2, 1, 1]
    torch.testing.assert_close(loss, torch.stack([*first, second]).mean())


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
