"""Batched augmentation against a slow loop over images, and normalisation against its formula."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sizewise.common import rng
from sizewise.data import AUGMENTATIONS
from sizewise.data.augment import CHUNK, Transform, augment_once, crop, cutout
from sizewise.errors import ConfigError

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)


def some_images(batch: int = 6, channels: int = 3, height: int = 16, width: int = 16) -> Tensor:
    generator = rng.torch_generator(0, "images")
    shape = (batch, channels, height, width)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def slow_crop(images: Tensor, pad: int, top: Tensor, left: Tensor, mirror: Tensor) -> Tensor:
    batch, channels, height, width = images.shape
    result = torch.zeros_like(images)
    for b in range(batch):
        framed = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=images.dtype)
        framed[:, pad : pad + height, pad : pad + width] = images[b]
        y, x = int(top[b]), int(left[b])
        window = framed[:, y : y + height, x : x + width]
        result[b] = window.flip(2) if mirror[b] else window
    return result


def slow_cutout(images: Tensor, side: int, row: Tensor, column: Tensor, blank: Tensor) -> Tensor:
    result = images.clone()
    half = side // 2
    for b in range(len(images)):
        y, x = int(row[b]), int(column[b])
        rows = slice(max(y - half, 0), y + half)
        columns = slice(max(x - half, 0), x + half)
        result[b, :, rows, columns] = blank
    return result


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 5),
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    pad=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_crop_equals_the_loop(
    batch: int, channels: int, height: int, width: int, pad: int, seed: int
) -> None:
    images = some_images(batch, channels, height, width)
    generator = torch.Generator().manual_seed(seed)
    top, left = torch.randint(2 * pad + 1, (2, batch), generator=generator)
    mirror = torch.randint(2, (batch,), generator=generator).bool()
    moved = crop(images, pad, top, left, mirror)
    assert torch.equal(moved, slow_crop(images, pad, top, left, mirror))
    assert moved.is_contiguous()
    assert moved.dtype == torch.uint8


@settings(max_examples=30, deadline=None)
@given(height=st.integers(2, 9), width=st.integers(2, 9), seed=st.integers(0, 1000))
def test_cutout_equals_the_loop(height: int, width: int, seed: int) -> None:
    images = some_images(5, 3, height, width)
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(height, (5,), generator=generator)
    column = torch.randint(width, (5,), generator=generator)
    blank = torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1)
    expected = slow_cutout(images, height // 2, row, column, blank)
    assert torch.equal(cutout(images, height // 2, row, column, blank), expected)


def test_no_offset_changes_nothing() -> None:
    images = some_images()
    in_place = torch.full((len(images),), 2)
    assert torch.equal(crop(images, 2, in_place, in_place, torch.zeros(6).bool()), images)


@pytest.mark.parametrize("policy", AUGMENTATIONS)
def test_every_policy_gives_contiguous_floats_and_keeps_its_input(policy: str) -> None:
    images = some_images()
    before = images.clone()
    transform = Transform(policy, MEAN, STD)
    first, again = (transform(images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.dtype == torch.float32
    assert first.shape == images.shape
    assert first.is_contiguous()
    assert torch.equal(images, before)


@pytest.mark.parametrize("policy", AUGMENTATIONS)
def test_evaluation_only_normalises(policy: str) -> None:
    images = some_images()
    expected = (images.double() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(
        3, 1, 1
    )
    output = Transform(policy, MEAN, STD)(images, None)
    torch.testing.assert_close(output, expected.float(), atol=1e-5, rtol=1e-5)


def test_channels_last_input_comes_out_contiguous() -> None:
    images = some_images().contiguous(memory_format=torch.channels_last)
    for generator in (None, torch.Generator()):
        assert Transform("crop-flip", MEAN, STD)(images, generator).is_contiguous()


def test_flip_mirrors_about_half_and_moves_nothing() -> None:
    images = some_images(batch=400, height=8, width=8)
    output = Transform("flip", MEAN, STD).augment(images, torch.Generator().manual_seed(0))
    same = (output == images).flatten(1).all(1)
    mirrored = (output == images.flip(3)).flatten(1).all(1)
    assert bool((same | mirrored).all())
    assert 150 < int(mirrored.sum()) < 250


def test_shift_moves_by_at_most_an_eighth_and_never_mirrors() -> None:
    # One white pixel in the middle shows where each image went.
    images = torch.zeros(300, 1, 16, 16, dtype=torch.uint8)
    images[:, 0, 8, 5] = 255
    output = Transform("shift", (0.5,), (0.5,)).augment(images, torch.Generator().manual_seed(0))
    _, _, rows, columns = output.nonzero().unbind(1)
    assert sorted(set(rows.tolist())) == [6, 7, 8, 9, 10]
    assert sorted(set(columns.tolist())) == [3, 4, 5, 6, 7]


def test_cutout_blanks_to_the_mean() -> None:
    images = torch.full((50, 3, 16, 16), 255, dtype=torch.uint8)
    transform = Transform("crop-flip-cutout", MEAN, STD, pad=0)
    output = transform(images, torch.Generator().manual_seed(0))
    blank = (output.abs() < 0.02).all(1).flatten(1).sum(1)
    assert int(blank.min()) >= 4 * 4  # a corner at least
    assert int(blank.max()) == 8 * 8


def test_augment_once_works_in_chunks_and_keeps_bytes() -> None:
    images = some_images(batch=CHUNK + 7, channels=1, height=8, width=8)
    transform = Transform("crop-flip", (0.5,), (0.5,))
    once = augment_once(images, transform, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    parts = [transform.augment(part, generator) for part in (images[:CHUNK], images[CHUNK:])]
    assert torch.equal(once, torch.cat(parts))
    assert once.dtype == torch.uint8
    assert once.is_contiguous()
    plain = dataclasses.replace(transform, policy="none")
    assert torch.equal(plain(once, torch.Generator()), plain(once, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "crop-flp"}, "did you mean 'crop-flip'"),
        ({"pad": -1}, "^Transform's pad must be"),
        ({"std": (0.0, 1.0, 1.0)}, "above 0"),
        ({"std": (1.0,)}, "each channel"),
    ],
)
def test_bad_options(change: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"policy": "none", "mean": MEAN, "std": STD} | change
    with pytest.raises(ConfigError, match=message):
        Transform(**options)  # type: ignore[arg-type]
