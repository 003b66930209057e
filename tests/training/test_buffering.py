"""Buffers: fixed batches, in memory or in files, and what a part of a model makes of them."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sizewise.data.augment import Transform
from sizewise.memory.prediction import Meter, OutOfBudget
from sizewise.training.buffering import Buffer, allocate, fixed
from sizewise.training.loop import Shard

EVERYTHING = float("inf")
BYTES = 4 * 9  # Of one image as floats.


def shard_of(rows: int, augment: str = "none") -> Shard:
    """Images that are their row number everywhere, so that a batch tells what is in it."""
    images = torch.arange(rows, dtype=torch.uint8).view(-1, 1, 1, 1).expand(rows, 1, 3, 3)
    labels = torch.arange(rows) % 5
    return Shard(images.contiguous(), labels, torch.arange(rows), Transform(augment, (0,), (1,)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(images: Tensor) -> tuple[int, ...]:
    return tuple((images[:, 0, 0, 0] * 255).round().int().tolist())


def one_pass(buffer: Buffer, seed: int) -> list[tuple[int, ...]]:
    batches = list(buffer.batches(4, generator(seed)))
    for images, labels in batches:
        assert labels.tolist() == [row % 5 for row in rows_of(images)]
    return [rows_of(images) for images, _ in batches]


@pytest.mark.parametrize("room", [EVERYTHING, 0.0], ids=["memory", "file"])
def test_batches_keep_their_composition_and_change_their_order(room: float, tmp_path: Path) -> None:
    shard = shard_of(14)
    buffer = fixed(shard, 4, generator(), room, tmp_path)
    expected = [rows_of(images) for images, _ in shard.batches(4, generator())]
    passes = [one_pass(buffer, seed) for seed in range(6)]
    assert all(sorted(found) == sorted(expected) for found in passes)
    assert len({tuple(found) for found in passes}) > 3
    assert len(buffer) == 14
    assert buffer.in_memory == (room > 0) == bool(buffer.held)
    assert not list(tmp_path.iterdir())  # A file has no name any more once it is mapped.


def test_images_are_augmented_once(tmp_path: Path) -> None:
    shard = shard_of(8, "crop-flip")
    buffer = fixed(shard, 8, generator(), EVERYTHING, tmp_path)
    ((first, _),) = buffer.batches(8, generator(1))
    ((second, _),) = buffer.batches(8, generator(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("rows", "drop", "sizes"),
    [
        (9, False, [4, 4]),
        (10, False, [4, 4, 2]),
        (10, True, [4, 4]),
        (1, False, [1]),
        (3, True, []),
    ],
)
def test_the_rest_is_treated_as_without_a_buffer(
    rows: int, drop: bool, sizes: list[int], tmp_path: Path
) -> None:
    buffer = fixed(shard_of(rows), 4, generator(), EVERYTHING, tmp_path, drop_last=drop)
    assert [stop - start for start, stop in buffer.bounds] == sizes
    assert len(buffer) == sum(sizes)
    doubled = buffer.through(nn.Identity(), lambda x: 2 * x, EVERYTHING)
    assert len(doubled) == len(list(doubled.inputs)) == sum(sizes)


def test_a_batch_does_not_keep_the_buffer_alive(tmp_path: Path) -> None:
    buffer = fixed(shard_of(12), 4, generator(), EVERYTHING, tmp_path)
    images, labels = next(iter(buffer.batches(4, generator())))
    assert images.untyped_storage().nbytes() == 4 * BYTES
    assert labels.untyped_storage().nbytes() == 4 * 8


@pytest.mark.parametrize(("spare", "in_memory"), [(0, True), (-1, False)])
def test_a_tensor_is_in_memory_if_it_just_fits(spare: int, in_memory: bool, tmp_path: Path) -> None:
    tensor, found = allocate((3, 5), torch.float32, 60 + spare, tmp_path)
    assert found == in_memory
    tensor.copy_(torch.arange(15.0).view(3, 5))
    assert torch.equal(tensor, torch.arange(15.0).view(3, 5))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("room", [EVERYTHING, 0.0], ids=["memory", "file"])
@pytest.mark.parametrize("images", [EVERYTHING, 0.0], ids=["memory", "file"])
def test_a_part_sees_every_batch_as_it_was_made(images: float, room: float, tmp_path: Path) -> None:
    norm = nn.BatchNorm2d(1, track_running_stats=False).requires_grad_(False)  # Batches matter.
    buffer = fixed(shard_of(10), 4, generator(), images, tmp_path)
    passed = buffer.through(norm, norm, room)
    assert passed.in_memory == (room > 0)
    assert passed.bounds == buffer.bounds
    assert not passed.inputs.requires_grad
    for start, stop in buffer.bounds:
        assert torch.equal(passed.inputs[start:stop], norm(buffer.inputs[start:stop]))
    # What it was made from is as it was.
    assert sorted(one_pass(buffer, 1)) == sorted(one_pass(buffer, 2))


def test_the_meter_counts_both_buffers_while_one_is_filled(tmp_path: Path) -> None:
    part = nn.Conv2d(1, 2, 1, bias=False)
    buffer = fixed(shard_of(12), 4, generator(), EVERYTHING, tmp_path)
    meter = Meter()
    buffer.through(part, part, EVERYTHING, meter)
    weights, batch, result = 8, 4 * BYTES, 4 * 2 * BYTES
    assert meter.peak == weights + batch + result + 12 * BYTES + 12 * 2 * BYTES
    # A file does not count.
    on_disk, meter = fixed(shard_of(12), 4, generator(), 0, tmp_path), Meter()
    on_disk.through(part, part, 0, meter)
    assert meter.peak == weights + batch + result
    with pytest.raises(OutOfBudget):
        on_disk.through(part, part, 0, Meter(meter.peak - 1))


def test_files_go_where_they_are_told(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        buffer = fixed(shard_of(8), 4, generator(), 0, Path(folder))
        passed = buffer.through(nn.Identity(), lambda x: x + 1, 0)
        assert not list(Path(folder).iterdir())  # Their names are gone as soon as they are mapped.
    assert not list(tmp_path.iterdir())
    # A file that is gone by its name is still there for who has it open.
    assert passed.inputs.mean() == buffer.inputs.mean() + 1
