"""What is packed comes back, bit for bit."""

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from sizewise.engines.shared_tensors import TYPES
from sizewise.errors import UpdateRefused
from sizewise.exchange.state import sha256
from sizewise.flower import wire


@given(
    kind=st.sampled_from(sorted(TYPES)),
    shape=st.lists(st.integers(0, 4), max_size=3),
    seed=st.integers(0, 9),
)
def test_tensors_come_back_as_they_were(kind: str, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator) * 50).to(TYPES[kind])
    for sent in (tensor, tensor.mT if tensor.ndim > 1 else tensor):
        (back,) = wire.unpack(wire.pack({"a": sent})).values()
        assert back.dtype == sent.dtype
        assert sha256({"a": back}) == sha256({"a": sent})


def test_values_that_are_no_numbers_come_back_too() -> None:
    tensor = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    back = wire.unpack(wire.pack({"a": tensor}))["a"]
    assert back.view(torch.int32).equal(tensor.view(torch.int32))


def test_what_came_can_be_changed() -> None:
    """Training happens in place; a view of the message's own bytes could not be written to."""
    back = wire.unpack(wire.pack({"a": torch.zeros(2)}))["a"]
    back += 1
    assert back.tolist() == [1, 1]


def test_reading_text_is_bounded() -> None:
    content = RecordDict({"report": ConfigRecord({"json": "1" * (wire.LONGEST_TEXT + 1)})})
    with pytest.raises(UpdateRefused, match="reasonable length"):
        wire.read(content, "report")
