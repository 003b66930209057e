"""What operations return is known without torch's meta kernels, and says the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sizewise.torch_tools.dry_run import MetaMode, tensors_in

X = torch.empty(2, 6, 8, 8, device="meta")
W = torch.empty(6, 6, 3, 3, device="meta")

OPERATIONS: dict[str, Callable[[], object]] = {
    "convolution": lambda: F.conv2d(X, W, stride=2, padding=1),
    "transposed": lambda: F.conv_transpose2d(X, W),
    "channels last": lambda: F.conv2d(X.to(memory_format=torch.channels_last), W),
    "batch norm": lambda: F.batch_norm(X, None, None, training=True),
    "group norm": lambda: F.group_norm(X, 2),
    "layer norm": lambda: F.layer_norm(X, (8,)),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X),
    "product": lambda: X.flatten(1) @ X.flatten(1).T,
    "pooling": lambda: F.max_pool2d(X, 2, return_indices=True),
    "several": lambda: X.max(dim=1),
    "in place": lambda: X.clone().mul_(2.0),
    "views": lambda: X.transpose(1, 2)[:, 1:].split(2, dim=2),
    "promotion": lambda: X.argmax(dim=1) + 1.0,
    "copy": lambda: X.to("meta", torch.float64),
    "chosen": lambda: X[:, torch.zeros(3, dtype=torch.int64, device="meta")],
}


def outcome(operation: Callable[[], object]) -> list[tuple[object, ...]]:
    found = tensors_in(operation())
    return [(t.shape, t.stride(), t.dtype, t.device.type) for t in found]


@pytest.mark.parametrize("name", OPERATIONS)
def test_meta_tensors_have_the_results_that_torch_gives_them(name: str) -> None:
    expected = outcome(OPERATIONS[name])
    for _ in range(2):  # The second time from memory.
        with MetaMode():
            assert outcome(OPERATIONS[name]) == expected


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x + torch.ones(8, 8),  # On another device.
        lambda x: x + x[:1, :1, :3, :3],  # Of shapes that do not fit.
    ],
)
def test_what_fails_on_meta_tensors_still_fails(operation: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        operation(X)
    with MetaMode(), pytest.raises(type(expected.value)) as found:
        operation(X)
    assert str(found.value) == str(expected.value)


def test_random_operations_leave_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    with MetaMode():
        F.dropout(torch.empty(3, 5, device="meta"), 0.5)
        torch.rand_like(torch.empty(3, 7, device="meta"))
    assert torch.equal(torch.random.get_rng_state(), before)
