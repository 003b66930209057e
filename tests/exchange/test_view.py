from itertools import product

import pytest
import torch

from sizewise.errors import UpdateRefused
from sizewise.exchange.view import TensorSlice, check, cut, grid, size_in_bytes, whole

MATRIX = torch.arange(12.0).reshape(3, 4)


def test_slices_cut_a_corner_without_copying() -> None:
    piece = TensorSlice("w", (slice(0, 2), slice(1, 3))).read({"w": MATRIX})
    assert piece.tolist() == [[1, 2], [5, 6]]
    assert piece.untyped_storage().data_ptr() == MATRIX.untyped_storage().data_ptr()


def test_lists_cut_the_outer_product_in_their_order() -> None:
    rows, columns = torch.tensor([2, 0]), torch.tensor([3, 1, 0])
    assert TensorSlice("w", (rows, columns)).read({"w": MATRIX}).tolist() == [[11, 9, 8], [3, 1, 0]]


def test_lists_and_slices_mix() -> None:
    rows = torch.tensor([2, 0])
    assert TensorSlice("w", (rows, slice(0, 4, 2))).read({"w": MATRIX}).tolist() == [
        [8, 10],
        [0, 2],
    ]
    assert TensorSlice("w", (slice(None), torch.tensor([1]))).read({"w": MATRIX}).tolist() == [
        [1],
        [5],
        [9],
    ]


def test_convolution_is_cut_in_its_channels() -> None:
    weight = torch.randn(4, 3, 2, 2)
    index = (torch.tensor([3, 1]), torch.tensor([0, 2]), slice(None), slice(None))
    expected = weight[[3, 1]][:, [0, 2]]
    assert torch.equal(TensorSlice("w", index).read({"w": weight}), expected)


@pytest.mark.parametrize("kinds", list(product("lsw", repeat=4)))
def test_read_is_the_grid(kinds: tuple[str, ...]) -> None:
    tensor = torch.randn(5, 4, 3, 3)
    parts = {"s": slice(1, 3), "w": slice(None)}
    lists = [torch.tensor(entries) for entries in ([4, 0, 2], [1, 3], [2, 0], [0])]
    index = tuple(parts.get(kind, entries) for kind, entries in zip(kinds, lists, strict=True))
    slot = TensorSlice("w", index)
    piece = slot.read({"w": tensor})
    assert torch.equal(piece, tensor[grid(index, tensor.shape)])
    assert tuple(piece.shape) == slot.shape({"w": tensor})


def test_scalar_has_the_empty_index() -> None:
    assert TensorSlice("n", ()).read({"n": torch.tensor(7)}).item() == 7


def test_index_of_slices_stays_slices() -> None:
    index = (slice(0, 2), slice(None))
    assert grid(index, MATRIX.shape) is index


def test_index_must_name_every_dimension() -> None:
    with pytest.raises(ValueError, match="zip"):
        grid((torch.tensor([0]),), MATRIX.shape)


def test_whole_view_hands_out_the_tensors_themselves() -> None:
    tensors = {"w": MATRIX, "b": torch.zeros(2)}
    piece = cut(tensors, whole(tensors))
    assert all(piece[name] is tensors[name] for name in tensors)


def test_cut_renames() -> None:
    view = {
        "blocks.0.w": TensorSlice("blocks.7.w"),
        "norm": TensorSlice("norm@small", (slice(0, 1),)),
    }
    server = {"blocks.7.w": MATRIX, "norm@small": torch.tensor([4.0, 5.0])}
    piece = cut(server, view)
    assert list(piece) == ["blocks.0.w", "norm"]
    assert piece["norm"].tolist() == [4]


def test_bytes_count_entries_times_their_size() -> None:
    tensors = {"w": MATRIX[:2, :3], "n": torch.tensor(3), "h": torch.zeros(5, dtype=torch.half)}
    assert size_in_bytes(tensors) == 6 * 4 + 8 + 5 * 2


VIEW = {"w": TensorSlice("w", (slice(0, 2), slice(0, 2))), "n": TensorSlice("n")}
SERVER = {"w": MATRIX, "n": torch.tensor(3)}


def test_update_that_fits_is_accepted_whole_or_in_part() -> None:
    check({"w": torch.ones(2, 2), "n": torch.tensor(4)}, VIEW, SERVER)
    check({"w": torch.ones(2, 2)}, VIEW, SERVER)
    check({}, VIEW, SERVER)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"x": torch.ones(2)}, "tensor 'x' was never sent to this device"),
        ({"w": torch.ones(3, 4)}, r"shape \(3, 4\), expected torch.float32 of shape \(2, 2\)"),
        ({"w": torch.ones(4)}, r"shape \(4,\), expected"),
        ({"w": torch.ones(2, 2).double()}, "torch.float64 .* expected torch.float32"),
        ({"w": torch.ones(2, 2).int()}, "torch.int32 .* expected torch.float32"),
        ({"w": torch.tensor([[1, torch.nan], [1, 1]])}, "'w' .* not finite; lower recipe.lr"),
        ({"w": torch.tensor([[1, torch.inf], [1, 1]])}, "not finite"),
        ({"w": torch.tensor([[torch.inf, -torch.inf], [1, 1]])}, "not finite"),
        ({"n": torch.tensor([3])}, r"'n' is torch.int64 of shape \(1,\)"),
    ],
)
def test_update_that_does_not_fit_is_refused(update: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UpdateRefused, match=message) as caught:
        check(update, VIEW, SERVER)
    assert "\n" not in str(caught.value)
