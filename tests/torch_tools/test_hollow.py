"""Hollow tensors behave like real ones in everything but their values."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise import models
from sizewise.torch_tools import results
from sizewise.torch_tools.hollow import HollowMode, NoData, emptied, room_of
from sizewise.torch_tools.remaking import remade

Operation = Callable[[Tensor, Tensor], object]

# Of images (4, 6, 8, 8) and weights (6, 6, 3, 3): what they return may be new, a view, a list, or
# one of the two.
OPERATIONS: dict[str, Operation] = {
    "convolution": lambda x, w: F.conv2d(x, w, padding=1),
    "strided": lambda x, w: F.conv2d(x, w, stride=2),
    "channels last": lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w),
    "product": lambda x, w: x.flatten(1) @ w.flatten()[: 8 * 8 * 6 // 2].repeat(2).unsqueeze(1),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x, w: F.group_norm(x, 2),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x),
    "pooling": lambda x, w: F.adaptive_avg_pool2d(x, 1),
    "largest": lambda x, w: x.max(dim=1),
    "view": lambda x, w: x.transpose(1, 2)[:, 1:],
    "several views": lambda x, w: x.split(2, dim=1),
    "copy of a view": lambda x, w: x.transpose(1, 2).reshape(4, -1),
    "in place": lambda x, w: x.mul_(2.0),
    "on a view": lambda x, w: x[0].add_(1),
    "list": lambda x, w: torch.cat([x, x], dim=1),
    "whole numbers": lambda x, w: x.argmax(dim=1) + 1,
    "promotion": lambda x, w: x.argmax(dim=1) + 1.0,
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "constant": lambda x, w: x * torch.arange(8),
    "padding": lambda x, w: F.pad(x, (0, 0, 0, 0, 2, 2)),
}


def outcome(operation: Operation, given: list[Tensor]) -> list[object]:
    """Return what is to be known of an operation's results, but for values."""
    results = operation(*given)
    tensors = [results] if isinstance(results, Tensor) else list(results)  # type: ignore[call-overload]
    storages: list[int] = []
    found: list[object] = []
    for tensor in [*given, *tensors]:
        storage = room_of(tensor)
        storages.append(storage._cdata)
        place = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        found.append((*place, storage.nbytes(), storages.index(storage._cdata)))
    return found


@pytest.mark.parametrize("small", [results.SMALL, 0], ids=["by the kernel", "by fake tensors"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_the_real_operation(
    name: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results._results.cache_clear()
    monkeypatch.setattr(results, "SMALL", small)
    real = [torch.rand(4, 6, 8, 8), torch.rand(6, 6, 3, 3)]
    empty = [emptied(tensor) for tensor in real]
    expected = outcome(OPERATIONS[name], real)
    for _ in range(2):  # The second time from memory.
        with HollowMode():
            assert outcome(OPERATIONS[name], empty) == expected
    results._results.cache_clear()


def test_a_norm_of_mixed_types_is_asked_itself_however_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Fake tensors give its statistics the type of the input, the kernel that of the weights.
    results._results.cache_clear()
    monkeypatch.setattr(results, "SMALL", 0)
    images, weights = torch.rand(4, 6, 8, 8).bfloat16(), torch.rand(6)
    norm = torch.ops.aten.native_batch_norm
    tail = (None, None, True, 0.1, 1e-5)
    expected = [out.dtype for out in norm(images, weights, weights, *tail)]
    with HollowMode():
        empty = emptied(images), emptied(weights), emptied(weights)
        assert [out.dtype for out in norm(*empty, *tail)] == expected
    assert expected == [torch.bfloat16, torch.float32, torch.float32]
    results._results.cache_clear()


def test_gradients_arrive() -> None:
    model = models.build("preresnet8", classes=3, image=(1, 8, 8))
    twin = remade(model, emptied)
    with HollowMode():
        F.cross_entropy(
            twin(emptied(torch.rand(4, 1, 8, 8))), emptied(torch.zeros(4).long())
        ).backward()
    for real, parameter in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        assert parameter.grad.shape == real.shape


def test_values_cannot_be_asked_for() -> None:
    tensor = emptied(torch.ones(()))
    with HollowMode(), pytest.raises(NoData):
        tensor.item()
    with pytest.raises(NoData, match="outside of a HollowMode"):
        tensor + 1


def test_a_prediction_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from sizewise import models
from sizewise.memory.prediction import cost
model = models.build("preresnet8", classes=3, image=(1, 8, 8))
cost(model, torch.empty(4, 1, 8, 8, device="meta"))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
