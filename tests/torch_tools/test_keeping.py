"""Tensors that wait in bfloat16: each once, and only if it saves bytes."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sizewise.errors import ModelError
from sizewise.memory.meter import Meter
from sizewise.torch_tools.keeping import SMALL, AsItIs, InHalf

COUNT = 4 * SMALL


def same(kept: Tensor, tensor: Tensor) -> bool:
    rounded = torch.equal(kept, tensor.to(torch.bfloat16).float())
    strides = zip(kept.stride(), tensor.stride(), tensor.shape, strict=True)
    return rounded and all(a == b or size == 1 for a, b, size in strides)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(COUNT),
        torch.randn(8, 4, COUNT // 32).transpose(0, 2),
        torch.randn(2, 8, COUNT // 16, 1).permute(0, 3, 1, 2),
        torch.randn(1, 8, COUNT // 8).transpose(0, 1),
    ],
)
def test_whatever_fills_its_storage_comes_back_with_its_strides(tensor: Tensor) -> None:
    keeper = InHalf([])
    assert same(keeper.unpack(keeper.pack(tensor)), tensor)


def test_a_part_of_a_storage_comes_back() -> None:
    keeper, whole = InHalf([]), torch.randn(16, COUNT // 8)
    parts = [whole[:, : COUNT // 16], whole[:, COUNT // 16 :]]
    packed = [keeper.pack(part) for part in parts]
    for part, kept in zip(parts, packed, strict=True):
        assert torch.equal(keeper.unpack(kept), part.to(torch.bfloat16).float())


def test_a_tensor_that_is_saved_again_takes_no_more_bytes() -> None:
    tensor = torch.randn(8, COUNT // 8)
    keeper = InHalf([])
    with Meter() as meter:
        meter.track(tensor)
        packed = [keeper.pack(view) for view in (tensor, tensor.t(), tensor.view(-1), tensor + 0)]
        assert meter.live == 4 * COUNT + 2 * (2 * COUNT)  # The last one is another tensor.
        del packed[-1]
        assert meter.live == 4 * COUNT + 2 * COUNT
        tensor.mul_(2)  # What is saved now has other values.
        packed.append(keeper.pack(tensor))
        assert meter.live == 4 * COUNT + 2 * (2 * COUNT)
        assert same(keeper.unpack(packed[-1]), tensor)
        assert same(keeper.unpack(packed[0]), tensor / 2)


def test_storages_that_are_gone_are_not_mistaken_for_new_ones() -> None:
    keeper, packed, expected = InHalf([]), [], []
    for _ in range(20):  # The allocator gives the same address again.
        tensor = torch.randn(COUNT)
        packed.append(keeper.pack(tensor))
        expected.append(tensor.to(torch.bfloat16).float())
        del tensor
    assert all(torch.equal(keeper.unpack(p), e) for p, e in zip(packed, expected, strict=True))


@pytest.mark.parametrize("kind", ["alive", "view", "small", "integer", "double", "broadcast"])
def test_what_would_not_save_bytes_is_kept_as_it_is(kind: str) -> None:
    weights = torch.randn(8, COUNT // 8)
    tensor = {
        "alive": weights,
        "view": weights.t()[1:],
        "small": torch.randn(SMALL),
        "integer": torch.arange(COUNT),
        "double": torch.randn(COUNT, dtype=torch.float64),
        "broadcast": torch.randn(COUNT // 8).expand(8, -1),
    }[kind]
    keeper = InHalf([weights])
    kept = keeper.unpack(keeper.pack(tensor))
    assert kept.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert torch.equal(kept, tensor)


def test_a_tensor_that_was_changed_meanwhile_is_noticed() -> None:
    for keeper in (AsItIs(), InHalf([])):
        tensor = torch.randn(10)
        kept = keeper.pack(tensor)
        tensor.add_(1)
        with pytest.raises(ModelError, match="changed in place"):
            keeper.unpack(kept)


def test_behind_operations_the_bytes_are_fewer() -> None:
    inputs = torch.randn(16, 1024)
    live = []
    for keeper in (AsItIs(), InHalf([inputs])):
        weights = torch.ones(1024, requires_grad=True)
        with Meter() as meter:
            meter.track(inputs, weights)
            before = meter.live
            with saved_tensors_hooks(keeper.pack, keeper.unpack):
                value = (inputs * weights).relu().exp().sum()
            live.append(meter.live - before - 4)
            value.backward()
    assert live[1] * 2 == live[0] == 2 * inputs.nbytes
