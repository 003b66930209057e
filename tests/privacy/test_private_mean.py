"""The private merge, by hand and for random pieces: what one device can move, and the noise."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from sizewise.errors import ConfigError
from sizewise.exchange.coverage_mean import CoverageMean, EntryWeights
from sizewise.exchange.merging import Merging
from sizewise.exchange.view import TensorSlice, View, whole
from sizewise.privacy.private_mean import Bound, PrivateMean
from sizewise.privacy.randomness import Secret

SECRET = Secret.of_seed(0)
SILENT = 1e-100
"""A noise multiplier that changes no bit: what is left is the clipped sum."""


def mean(
    server: Mapping[str, Tensor],
    expected: Mapping[str, float | Tensor],
    noise: float = SILENT,
    clip: float = 1.0,
    round_index: int = 0,
    devices: float = 1.0,
    **more: float,
) -> PrivateMean:
    bound = Bound(clip, noise, **more)
    return PrivateMean(server, expected, devices, bound, SECRET, round_index)


def corner(size: int) -> TensorSlice:
    return TensorSlice("w", (slice(0, size),))


# ---- by hand


def test_one_norm_over_all_tensors_of_a_piece() -> None:
    server = {"w": torch.zeros(2), "b": torch.ones(1)}
    merge = mean(server, {"w": 2.0, "b": 2.0}, clip=2.5)
    # The change is (3, 0) and 4: its norm is 5, so half of it is left, for two devices.
    merge.add({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([5.0])}, whole(server), 7.0)
    assert {name: t.tolist() for name, t in merge.result().items()} == {"w": [0.75, 0], "b": [2]}


def test_what_is_short_enough_is_not_clipped() -> None:
    server = {"w": torch.zeros(2)}
    merge = mean(server, {"w": 1.0}, clip=5.0)
    merge.add({"w": torch.tensor([3.0, 4.0])}, whole(server), 1.0)
    assert merge.result()["w"].tolist() == [3, 4]


def test_sums_are_divided_by_what_was_expected_of_each_entry() -> None:
    server = {"w": torch.full((3,), 10.0)}
    merge = mean(server, {"w": torch.tensor([4.0, 2.0, 0.0])}, clip=100.0)
    # Of four that cover the first entry, one came; nobody was expected to hold the last.
    merge.add({"w": torch.tensor([14.0, 12.0])}, {"w": corner(2)}, 1.0)
    assert merge.result()["w"].tolist() == [11, 11, 10]
    covered = merge.covered("w")
    assert isinstance(covered, Tensor)
    assert covered.tolist() == [True, True, False]


def test_few_expected_devices_count_as_the_smallest_weight() -> None:
    server = {"w": torch.zeros(2)}
    for least, entries in ((1.0, [2, 1]), (0.25, [8, 1])):
        merge = mean(server, {"w": torch.tensor([0.25, 2.0])}, clip=9.0, smallest_weight=least)
        merge.add({"w": torch.tensor([2.0, 2.0])}, whole(server), 1.0)
        assert merge.result()["w"].tolist() == entries


def test_how_many_samples_a_device_has_does_not_count() -> None:
    server = {"w": torch.zeros(1)}
    results = []
    for weight in (1.0, 1000.0):
        merge = mean(server, {"w": 1.0})
        merge.add({"w": torch.tensor([0.5])}, whole(server), weight)
        results.append(merge.result()["w"].item())
    assert results == [0.5, 0.5]


def test_whole_numbers_and_what_nobody_trains_keep_their_bits() -> None:
    server = {"w": torch.zeros(1), "count": torch.tensor(3), "frozen": torch.tensor([0.1])}
    merge = mean(server, {"w": 1.0, "count": 1.0}, noise=1.0)
    merge.add({"count": torch.tensor(99), "frozen": torch.tensor([5.0])}, whole(server), 1.0)
    found = merge.result()
    assert found["count"] is server["count"]
    assert found["frozen"] is server["frozen"]
    assert [merge.covered(name) for name in server] == [True, False, False]


def test_variances_do_not_become_negative() -> None:
    server = {"norm.running_var": torch.full((200,), 0.01), "norm.running_mean": torch.zeros(200)}
    found = mean(server, dict.fromkeys(server, 1.0), noise=1.0).result()
    assert (found["norm.running_var"] >= 0).all()
    assert (found["norm.running_mean"] < 0).any()


def test_an_update_that_is_not_finite_adds_nothing() -> None:
    server = {"w": torch.zeros(2)}
    merge = mean(server, {"w": 1.0})
    merge.add({"w": torch.tensor([math.inf, 1.0])}, whole(server), 1.0)
    assert merge.result()["w"].tolist() == [0, 0]


def test_noise_has_the_deviation_of_clip_times_multiplier_over_the_weight() -> None:
    server = {"w": torch.zeros(20_000)}
    found = mean(server, {"w": 4.0}, noise=2.0, clip=3.0).result()["w"]
    assert found.mean().item() == pytest.approx(0.0, abs=0.05)
    assert found.std().item() == pytest.approx(2.0 * 3.0 / 4.0, rel=0.02)


def test_noise_is_the_same_for_the_same_sum_and_another_for_any_other() -> None:
    server = {"w": torch.zeros(50)}

    def released(value: float, round_index: int = 0) -> Tensor:
        merge = mean(server, {"w": 1.0}, noise=1.0, round_index=round_index)
        merge.add({"w": torch.full((50,), value)}, whole(server), 1.0)
        return merge.result()["w"] - torch.full((50,), value)

    once = released(0.01)
    assert torch.equal(once, released(0.01))
    # The difference of two sums with one noise would tell what a device sent.
    assert (released(0.02) - once).std() > 0.5
    assert (released(0.01, round_index=1) - once).std() > 0.5


# ---- a clip that follows a quantile


def test_the_clip_follows_the_quantile_by_hand() -> None:
    server = {"w": torch.zeros(1)}
    merge = mean(server, {"w": 4.0}, devices=4.0, quantile=0.5, quantile_noise=1e-90, step=0.2)
    for value in (0.1, 0.2, 0.3, 5.0):
        merge.add({"w": torch.tensor([value])}, whole(server), 1.0)
    # Three of four are below 1: the share is 3/4, a quarter above the quantile.
    assert merge.next_clip == pytest.approx(math.exp(-0.2 * 0.25))


def test_nobody_came_moves_the_clip_as_if_half_were_below() -> None:
    server = {"w": torch.zeros(1)}
    merge = mean(server, {"w": 4.0}, devices=4.0, quantile=0.9, quantile_noise=1e-90, step=0.2)
    assert merge.next_clip == pytest.approx(math.exp(0.2 * 0.4))


def test_the_clip_stays_while_nobody_can_take_part() -> None:
    merge = mean({"w": torch.zeros(1)}, {}, devices=0.0, quantile=0.9, quantile_noise=1.0)
    assert merge.next_clip == 1.0


def test_the_two_noises_add_up_to_the_multiplier() -> None:
    bound = Bound(1.0, 1.0, quantile=0.5, quantile_noise=1.0)
    assert bound.noise_on_updates == pytest.approx((1 - 1 / 4) ** -0.5)
    with pytest.raises(ConfigError, match=r"more than 0\.5"):
        _ = Bound(1.0, 1.0, quantile=0.5, quantile_noise=0.5).noise_on_updates


# ---- what one device can move

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2, 2)}
SERVER = {name: torch.full(shape, 0.5, dtype=torch.float64) for name, shape in SHAPES.items()}


@st.composite
def places(draw: st.DrawFn, name: str) -> TensorSlice:
    """Draw the whole of a tensor, or some entries of each dimension."""
    if draw(st.booleans()):
        return TensorSlice(name)
    index: list[slice | Tensor] = []
    for size in SHAPES[name]:
        if draw(st.booleans()):
            index.append(slice(0, draw(st.integers(1, size))))
        else:
            kept = draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
            index.append(torch.tensor(kept))
    return TensorSlice(name, tuple(index))


@st.composite
def pieces(draw: st.DrawFn) -> tuple[dict[str, Tensor], View]:
    """Draw a device's piece, and what it sends of it, of any length."""
    names = draw(st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, unique=True))
    view = {f"own.{name}": draw(places(name)) for name in names}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    scale = 10.0 ** draw(st.integers(-3, 3))
    return {
        local: scale * torch.randn(place.shape(SERVER), generator=generator, dtype=torch.float64)
        for local, place in view.items()
    }, view


def covering(fleet: list[View], rate: float) -> dict[str, Tensor]:
    """Return how many of a fleet are expected to cover each entry."""
    found = {name: EntryWeights(tensor) for name, tensor in SERVER.items()}
    for view in fleet:
        for place in view.values():
            found[place.name].add(place.index, rate)
    return {
        name: torch.as_tensor(weights.total()).expand(SHAPES[name]).double()
        for name, weights in found.items()
    }


def summed(merge: Merging, updates: list[tuple[dict[str, Tensor], View]]) -> dict[str, Tensor]:
    for update, view in updates:
        merge.add(update, view, 1.0)
    return merge.result()


@given(
    others=st.lists(pieces(), max_size=4),
    own=pieces(),
    absent=st.lists(pieces(), max_size=3),
    clip=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_one_device_moves_the_sum_by_at_most_the_clip(
    others: list[tuple[dict[str, Tensor], View]],
    own: tuple[dict[str, Tensor], View],
    absent: list[tuple[dict[str, Tensor], View]],
    clip: float,
) -> None:
    # The fleet, and so what is expected, is the same: the device answers, or does not.
    expected = covering([view for _, view in (*others, own, *absent)], rate=0.3)
    with_it = summed(mean(SERVER, expected, clip=clip), [*others, own])
    without = summed(mean(SERVER, expected, clip=clip), others)
    square = 0.0
    for name, weight in expected.items():
        moved = (with_it[name] - without[name]) * weight.clamp(min=1.0)
        assert not moved[weight == 0].any()
        square += float(moved.square().sum())
    assert math.sqrt(square) <= clip * (1 + 1e-9)


@example(reach=5)
@given(reach=st.integers(1, 5))
def test_also_where_a_piece_covers_what_nobody_else_does(reach: int) -> None:
    everybody, alone = TensorSlice("b", (slice(0, 1),)), TensorSlice("b", (slice(0, reach),))
    crowd = [({"b": torch.ones(1, dtype=torch.float64)}, {"b": everybody})] * 9
    own = {"b": torch.full((reach,), 1e6, dtype=torch.float64)}, {"b": alone}
    expected = covering([view for _, view in (*crowd, own)], rate=0.5)
    weight = expected["b"].clamp(min=1.0)
    with_it = summed(mean(SERVER, expected), [*crowd, own])["b"]
    without = summed(mean(SERVER, expected), crowd)["b"]
    assert ((with_it - without) * weight).norm() == pytest.approx(1.0)
    # A mean over those who came has no such bound: what nobody else covers is the device's own.
    if reach > 1:
        plain = summed(CoverageMean(SERVER), [*crowd, own])["b"]
        assert (plain - summed(CoverageMean(SERVER), crowd)["b"]).norm() > 1e5
