import hashlib
import struct

import pytest
import torch

from sizewise.exchange.state import State, sha256


def test_hash_by_hand() -> None:
    tensors = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor(3)}
    text = b"a:torch.int64:();" + struct.pack("<q", 3)
    text += b"b:torch.float32:(2,);" + struct.pack("<ff", 1, 2)
    assert sha256(tensors) == hashlib.sha256(text).hexdigest()


def test_hash_looks_at_values_not_at_strides_or_order() -> None:
    matrix = torch.randn(3, 4)
    tensors = {"x": matrix, "y": torch.ones(2)}
    turned = {"y": torch.ones(2), "x": matrix.t().contiguous().t()}
    assert sha256(tensors) == sha256(turned)


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": torch.tensor([0.0, 0, 0, 1e-45])},
        {"w": -torch.zeros(4)},
        {"w": torch.zeros(4), "x": torch.zeros(0)},
        {},
    ],
)
def test_hash_changes_with_name_shape_type_bits(other: dict[str, torch.Tensor]) -> None:
    assert sha256(other) != sha256({"w": torch.zeros(4)})


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.half, torch.bool, torch.uint8])
def test_hash_takes_any_type(kind: torch.dtype) -> None:
    assert sha256({"w": torch.ones(3, dtype=kind)}) != sha256({"w": torch.zeros(3, dtype=kind)})


def test_hash_takes_parameters() -> None:
    assert sha256({"w": torch.nn.Parameter(torch.ones(2))}) == sha256({"w": torch.ones(2)})


def test_state_is_frozen_and_starts_empty() -> None:
    state = State({"w": torch.ones(1)})
    assert (state.server_state, state.metadata, state.devices) == ({}, {}, {})
    with pytest.raises(AttributeError):
        state.tensors = {}  # type: ignore[misc]
