"""Which channels are kept: numbers, prefixes, windows, random sets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sizewise.cutting.channels import Group, trace
from sizewise.cutting.selection import keep, keep_like, prefix, random, rolling
from sizewise.cutting.shrinking import view
from sizewise.errors import ModelError
from sizewise.models import build

IMAGE = torch.empty(2, 3, 8, 8, device="meta")


def group(size: int, index: int = 0) -> Group:
    return Group(f"layer{index}.weight:0", index, size, ((f"layer{index}.weight", 0),))


def test_prefix() -> None:
    assert prefix(group(8), 3).tolist() == [0, 1, 2]


def test_window_rolls_and_is_sorted_when_it_wraps() -> None:
    windows = [rolling(r)(group(4), 2).tolist() for r in range(5)]
    assert windows == [[0, 1], [1, 2], [2, 3], [0, 3], [0, 1]]


def test_groups_of_equal_size_share_the_published_window() -> None:
    one, other = (rolling(5)(group(16, index), 4).tolist() for index in (0, 7))
    assert one == other


@given(size=st.integers(2, 40), kept=st.integers(1, 40), index=st.integers(0, 30), data=st.data())
def test_every_channel_is_kept_equally_often(
    size: int, kept: int, index: int, data: st.DataObject
) -> None:
    kept = min(kept, size)
    stride = data.draw(st.sampled_from(["common", "group"]))
    seen = torch.zeros(size, dtype=torch.long)
    for round_index in range(size):
        window = rolling(round_index, stride)(group(size, index), kept)
        assert len(window) == kept
        seen[window] += 1
    assert (seen == kept).all()


def test_strides_of_their_own_train_pairs_that_lockstep_never_does() -> None:
    def unseen(stride: str) -> int:
        pairs = torch.zeros(16, 16, dtype=torch.bool)
        for round_index in range(512):
            rule = rolling(round_index, stride)  # type: ignore[arg-type]
            rows, columns = rule(group(16, 0), 4), rule(group(16, 1), 4)
            pairs[rows[:, None], columns] = True
        return int((~pairs).sum())

    assert unseen("common") == 9 * 16  # Only 7 of the 16 diagonals are ever in the window.
    assert unseen("group") == 0


def test_random_is_sorted_fresh_and_repeatable() -> None:
    generator = torch.Generator().manual_seed(3)
    rule = random(generator)
    drawn = [rule(group(32, index), 8) for index in range(2)]
    assert not torch.equal(*drawn)
    assert all(torch.equal(d, d.unique()) and len(d) == 8 for d in drawn)
    again = random(torch.Generator().manual_seed(3))
    assert all(torch.equal(d, again(group(32, i), 8)) for i, d in enumerate(drawn))


def test_keep_rounds_as_asked() -> None:
    channels = trace(build("preresnet20", classes=5, image=(3, 8, 8)), IMAGE)

    def widths(ratio: float, rounding: str) -> set[int]:
        return {len(kept) for kept in keep(channels, ratio, rounding=rounding).values()}

    assert widths(1 / 6, "ceil") == {3, 6, 11}
    assert widths(0.165, "floor") == {2, 5, 10}
    assert widths(3 * 0.2, "ceil") == {10, 20, 39}
    assert widths(1, "floor") == {16, 32, 64}


def test_keep_asks_for_a_ratio_per_group() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 3))
    channels = trace(model, torch.empty(2, 6))
    kept = keep(channels, lambda g: 1.0 if g.index == 0 else 0.5)
    assert [len(k) for k in kept.values()] == [8, 2]


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, float("nan")])
def test_keep_refuses_other_ratios(ratio: float) -> None:
    channels = trace(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), torch.empty(2, 6))
    with pytest.raises(ModelError, match="above 0 and at most 1"):
        keep(channels, ratio)


NAMES = ["preresnet20", "resnet20", "resnet18", "densenet22", "cnn", "mlp", "vit"]


@pytest.mark.parametrize("width", [0.5, 1 / 6])
@pytest.mark.parametrize("name", NAMES)
def test_keep_like_gives_the_shapes_of_a_narrow_build(name: str, width: float) -> None:
    with torch.device("meta"):
        full = build_on_meta(name, 1.0)
        small = build_on_meta(name, width)
    channels = trace(full, IMAGE)
    slots = view(channels, keep_like(channels, small, rolling(5)))
    tensors = full.state_dict()
    assert {local: slot.shape(tensors) for local, slot in slots.items()} == {
        local: tuple(tensor.shape) for local, tensor in small.state_dict().items()
    }


def build_on_meta(name: str, width: float) -> nn.Module:
    # `build` checks a model on real images, so the factory is called directly.
    from sizewise.models import factory

    return factory(name)(classes=5, image=(3, 8, 8), width=width)


def test_keep_like_refuses_another_model() -> None:
    channels = trace(build("mlp", classes=5, image=(3, 8, 8)), IMAGE)
    other = build("cnn", classes=5, image=(3, 8, 8))
    with pytest.raises(ModelError, match="from the same factory"):
        keep_like(channels, other)
    wide = build("mlp", classes=5, image=(3, 8, 8), args={"hidden": [300, 300]})
    with pytest.raises(ModelError, match="does not fit the channels"):
        keep_like(channels, wide)
