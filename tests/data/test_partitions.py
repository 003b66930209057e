"""Every partition: disjoint, sized as it says, the same for the same seed; three slow oracles."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sizewise.common import rng
from sizewise.data import PARTITIONS
from sizewise.data.catalog import OTHER_NAMES
from sizewise.data.partitions import (
    Draw,
    Partition,
    Shards,
    load_partition,
    make,
    save,
    summary,
    with_validation,
)
from sizewise.data.schemes import SCHEMES
from sizewise.errors import ConfigError, DataError

CLASSES = 10
BUILT = sorted(set(PARTITIONS) - {"draw"})


def some_labels(total: int = 2000, classes: int = CLASSES, seed: int = 0) -> Tensor:
    return torch.randint(classes, (total,), generator=rng.torch_generator(seed, "labels"))


def built(name: str, labels: Tensor, devices: int, seed: int = 0, **options: float) -> Partition:
    groups = torch.arange(len(labels)) % (devices + 3)
    partition = make(name, labels, CLASSES, devices, seed, groups=groups, **options)  # type: ignore[arg-type]
    assert isinstance(partition, Partition)
    return partition


def as_lists(partition: Shards) -> list[list[int]]:
    return [partition.shard(device).tolist() for device in range(len(partition))]


def test_every_listed_partition_exists() -> None:
    assert {*SCHEMES, *OTHER_NAMES, "draw"} == set(PARTITIONS)


@pytest.mark.parametrize("name", BUILT)
@settings(max_examples=25, deadline=None)
@given(
    total=st.integers(150, 600),
    devices=st.sampled_from([1, 5, 10]),
    seed=st.integers(0, 10_000),
    alpha=st.floats(0.05, 100),
    per_device=st.sampled_from([2, 4, 10]),
)
def test_shards_are_disjoint_and_sized(
    name: str, total: int, devices: int, seed: int, alpha: float, per_device: int
) -> None:
    # HeteroFL's deck deals every class equally often, or not at all.
    assume(name != "shards" or devices * per_device % CLASSES == 0)
    labels = some_labels(total, seed=seed)
    partition = built(
        name, labels, devices, seed, alpha=alpha, classes_per_device=per_device, min_samples=1
    )
    assert len(partition) == devices
    order = partition.order.tolist()
    assert len(set(order)) == len(order)
    assert set(order) <= set(range(total))
    assert partition.sizes().tolist() == [len(shard) for shard in as_lists(partition)]
    assert int(partition.sizes().min()) > 0
    sizes = partition.sizes()
    if name in ("iid", "balanced-dirichlet", "equal-dirichlet"):
        assert sizes.tolist() == [total // devices] * devices
    if name in ("dirichlet", "capped-dirichlet", "split"):
        assert len(order) == total
    if name == "split":
        assert int(sizes.max() - sizes.min()) <= 1
    histogram = partition.histogram(labels, CLASSES)
    assert torch.equal(histogram.sum(1), sizes)
    if name in ("shards", "deck"):
        assert int((histogram > 0).sum(1).max()) <= per_device


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_same_seed_same_partition(name: str) -> None:
    labels = some_labels()
    groups = torch.arange(len(labels)) % 30
    first, again, other = (make(name, labels, CLASSES, 20, s, groups=groups) for s in (1, 1, 2))
    assert as_lists(first) == as_lists(again)
    assert as_lists(first) != as_lists(other)


def test_deck_gives_exactly_its_classes_when_they_divide() -> None:
    labels = torch.arange(2000) % CLASSES
    histogram = built("deck", labels, 20, classes_per_device=5).histogram(labels, CLASSES)
    assert (histogram > 0).sum(1).tolist() == [5] * 20
    assert histogram.sum(1).tolist() == [100] * 20


def test_shards_against_the_obvious_way() -> None:
    labels, devices, hand, seed = some_labels(523), 15, 2, 4
    generator = rng.numpy_generator(seed, "partition", "shards")
    per_class = hand * devices // CLASSES
    cards = [label for label in range(CLASSES) for _ in range(per_class)]
    cards = generator.permutation(cards).tolist()
    hands = [cards[hand * device : hand * (device + 1)] for device in range(devices)]
    expected: list[list[int]] = [[] for _ in range(devices)]
    for label in range(CLASSES):
        samples = [i for i, y in enumerate(labels.tolist()) if y == label]
        size = len(samples) // per_class
        pieces = [samples[size * p : size * (p + 1)] for p in range(per_class)]
        for piece, sample in zip(pieces, samples[size * per_class :], strict=False):
            piece.append(sample)
        pile = generator.permutation(per_class).tolist()
        for device in range(devices):
            if label in hands[device]:
                expected[device] += pieces[pile.pop(0)]
    partition = built("shards", labels, devices, seed, classes_per_device=hand)
    assert as_lists(partition) == [sorted(shard) for shard in expected]


@pytest.mark.parametrize("hand", [2, 3, 7])
def test_deck_against_the_obvious_way(hand: int) -> None:
    labels, devices, seed = some_labels(523), 8, 4
    generator = rng.numpy_generator(seed, "partition", "deck")
    pile: list[int] = []
    hands: list[list[int]] = []
    for _ in range(devices):
        while len(pile) < hand:
            pile += generator.permutation(CLASSES).tolist()
        hands.append(pile[:hand])
        pile = pile[hand:]
    expected: list[list[int]] = [[] for _ in range(devices)]
    for label in range(CLASSES):
        samples = [i for i, y in enumerate(labels.tolist()) if y == label]
        holders = [device for device in range(devices) for card in hands[device] if card == label]
        if holders:
            for device, piece in zip(holders, np.array_split(samples, len(holders)), strict=True):
                expected[device] += piece.tolist()
    partition = built("deck", labels, devices, seed, classes_per_device=hand)
    assert as_lists(partition) == [sorted(shard) for shard in expected]


def test_equal_dirichlet_against_the_obvious_way() -> None:
    labels, devices, alpha, seed = some_labels(523), 8, 0.1, 4
    generator = rng.numpy_generator(seed, "partition", "equal-dirichlet")
    drawn: list[list[int]] = [[] for _ in range(devices)]
    for label in range(CLASSES):
        samples = [i for i, y in enumerate(labels.tolist()) if y == label]
        counts = generator.multinomial(len(samples), generator.dirichlet([alpha] * devices))
        for device in range(devices):
            drawn[device] += [samples.pop(0) for _ in range(counts[device])]
    listed = [sample for shard in drawn for sample in shard]
    size = len(labels) // devices
    expected = [sorted(listed[size * k : size * (k + 1)]) for k in range(devices)]
    partition = built("equal-dirichlet", labels, devices, seed, alpha=alpha)
    assert as_lists(partition) == expected


def test_capped_dirichlet_keeps_its_minimum_and_its_cap() -> None:
    labels = torch.arange(5000) % CLASSES
    partition = built("capped-dirichlet", labels, 20, alpha=0.3, min_samples=40)
    sizes = partition.sizes()
    assert int(sizes.min()) >= 40
    # A device at its cap of N / K takes no further class, so it passes it by one class at most.
    assert int(sizes.max()) < 250 + 500
    assert float(sizes.double().std()) > 10


def test_dirichlet_is_the_usual_one() -> None:
    labels = some_labels()
    usual, capped = (built(n, labels, 20, 3, alpha=0.3) for n in ("dirichlet", "capped-dirichlet"))
    assert as_lists(usual) == as_lists(capped)
    with pytest.raises(DataError, match=r"^spreading classes by Dirichlet\(0.3\) could not give"):
        built("dirichlet", labels, 20, min_samples=101)


@pytest.mark.parametrize("name", ["dir", "lda", "Dirichlet", "non-iid"])
def test_whoever_looks_for_it_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match=r"mean 'dirichlet', with data\.alpha"):
        built(name, some_labels(), 20)


def test_dirichlet_sizes_spread_as_fedepth_reports() -> None:
    # FeDepth, CIFAR-10, 100 devices, after a fifth is held out: +- 150.6 at alpha 0.3, 77.4 at 1.
    labels = torch.arange(50_000) % CLASSES
    for alpha, low, high in ((0.3, 130, 230), (1.0, 65, 100)):
        partition = built("capped-dirichlet", labels, 100, alpha=alpha, min_samples=50)
        assert low < 0.8 * float(partition.sizes().double().std()) < high


def test_balanced_dirichlet_follows_alpha() -> None:
    labels = torch.arange(5000) % CLASSES
    rare, even = (
        built("balanced-dirichlet", labels, 20, alpha=alpha).histogram(labels, CLASSES)
        for alpha in (0.05, 1000.0)
    )
    assert float((rare[:5] > 0).sum(1).double().mean()) < 4
    assert int(even.min()) > 5


def test_balanced_dirichlet_tops_up_when_the_wanted_classes_run_out() -> None:
    # So small an alpha wants a single class, of which each has half as many as a device takes.
    labels = torch.arange(200) % CLASSES
    partition = built("balanced-dirichlet", labels, 5, alpha=1e-4)
    assert partition.sizes().tolist() == [40] * 5
    assert sorted(partition.order.tolist()) == list(range(200))


def test_natural_gives_each_device_one_writer() -> None:
    groups = torch.tensor([7, 3, 3, 9, 7, 9, 9])
    labels = torch.zeros(7, dtype=torch.int64)
    assert as_lists(make("natural", labels, 1, 3, 0, groups=groups)) == [[1, 2], [0, 4], [3, 5, 6]]
    some = make("natural", labels, 1, 2, 0, groups=groups)
    for shard in as_lists(some):
        assert len(set(groups[shard].tolist())) == 1


def test_shard_is_a_view() -> None:
    partition = built("iid", some_labels(), 10)
    assert partition.shard(3).untyped_storage().data_ptr() == (
        partition.order.untyped_storage().data_ptr()
    )
    for device in (-1, 10):
        with pytest.raises(IndexError, match="no device"):
            partition.shard(device)


def test_draw_serves_a_million_devices() -> None:
    labels = some_labels(50_000)
    partition = make("draw", labels, CLASSES, 1_000_000, 0, samples_per_device=40)
    assert len(partition) == 1_000_000
    for device in (0, 999_999):
        shard = partition.shard(device)
        assert shard.dtype == torch.int64
        assert len(set(shard.tolist())) == 40
        assert 0 <= int(shard.min()) <= int(shard.max()) < 50_000
    facts = summary(partition, labels, CLASSES)
    assert facts["samples"] == {"min": 40, "mean": 40.0, "max": 40, "total": 40_000_000}
    assert len(facts["histogram"]) == 1000  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        partition.shard(1_000_000)


def test_draw_uses_the_whole_pool_evenly() -> None:
    partition = Draw(pool=50, devices=1000, samples_per_device=5, seed=0)
    seen = Counter(torch.cat([partition.shard(k) for k in range(1000)]).tolist())
    assert len(seen) == 50
    assert 50 < min(seen.values()) <= max(seen.values()) < 150


def test_summary_is_json() -> None:
    labels = some_labels()
    partition = built("deck", labels, 20)
    facts = json.loads(json.dumps(summary(partition, labels, CLASSES)))
    assert facts["devices"] == 20
    assert facts["histogram"] == partition.histogram(labels, CLASSES).tolist()
    assert facts["samples"]["total"] == sum(map(sum, facts["histogram"]))


@pytest.mark.parametrize("share", [0.0, 0.2])
@pytest.mark.parametrize("name", ["split", "draw"])
def test_save_and_load(name: str, share: float, tmp_path: Path) -> None:
    partition = make(name, some_labels(), CLASSES, 13, 5, validation=share)
    save(partition, tmp_path / "partition.safetensors")
    loaded = load_partition(tmp_path / "partition.safetensors")
    assert type(loaded) is type(partition)
    assert as_lists(loaded) == as_lists(partition)
    assert loaded.held_out().tolist() == partition.held_out().tolist()
    assert bool(len(loaded.held_out())) == bool(share)


def test_loading_something_else_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "partition.safetensors"
    with pytest.raises(DataError, match="not a saved partition"):
        load_partition(file)
    file.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a saved partition"):
        load_partition(file)
    save(Partition(torch.arange(4), torch.tensor([0, 3, 2, 4])), file)
    with pytest.raises(DataError, match="offsets"):
        load_partition(file)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("iidd", {}, ConfigError, "did you mean 'iid'"),
        ("iid", {"devices": 0}, ConfigError, "fleet.devices"),
        ("iid", {"devices": 2001}, DataError, "2001 devices cannot share 2000 samples"),
        ("iid", {"classes": 5}, DataError, "labels in 0..4"),
        ("equal-dirichlet", {"alpha": 0.0}, ConfigError, "data.alpha"),
        ("equal-dirichlet", {"alpha": float("nan")}, ConfigError, "data.alpha"),
        ("deck", {"classes_per_device": 11}, ConfigError, "1..10, got 11"),
        ("shards", {"devices": 7, "classes_per_device": 3}, ConfigError, "multiple of the 10"),
        ("shards", {"devices": 2000, "classes_per_device": 10}, DataError, "without samples"),
        ("capped-dirichlet", {"min_samples": 101}, DataError, "lower data.min_samples"),
        ("capped-dirichlet", {"alpha": 0.01, "min_samples": 90}, DataError, "raise data.alpha"),
        ("natural", {}, DataError, "who wrote"),
        ("natural", {"groups": torch.arange(2000) % 3}, DataError, "3 groups for 20 devices"),
        ("draw", {"samples_per_device": 2001}, ConfigError, "1..2000"),
    ],
)
def test_what_cannot_be_made_says_what_to_change(
    name: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments: dict[str, object] = {"classes": CLASSES, "devices": 20, "seed": 0} | options
    with pytest.raises(error, match=message):
        make(name, some_labels(), **arguments)  # type: ignore[arg-type]


def test_offsets_are_in_order() -> None:
    offsets = built("capped-dirichlet", some_labels(), 10).offsets.tolist()
    assert all(start < end for start, end in pairwise(offsets))


# ---- what devices validate on


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_a_share_of_every_shard_is_kept_to_validate_on(name: str, share: float) -> None:
    labels = some_labels(700)
    whole, divided = built(name, labels, 10), built(name, labels, 10, validation=share)
    for device in range(10):
        trained, kept = divided.shard(device).tolist(), divided.validation(device).tolist()
        held = whole.shard(device).tolist()
        assert len(kept) == min(max(1, int(share * len(held) + 0.5)), len(held) - 1)
        # Both are in the order of the shard, and together they are all of it.
        assert [row for row in held if row in trained] == trained
        assert [row for row in held if row in kept] == kept
        assert sorted(trained + kept) == sorted(held)
    assert divided.sizes().tolist() == [len(divided.shard(device)) for device in range(10)]
    kept_by_all = [row for device in range(10) for row in divided.validation(device).tolist()]
    assert divided.held_out().tolist() == kept_by_all
    assert whole.held_out().tolist() == whole.validation(3).tolist() == []


def test_which_samples_are_kept_depends_on_the_seed() -> None:
    labels = some_labels(400)
    first, again = (built("split", labels, 4, validation=0.2) for _ in range(2))
    other = built("split", labels, 4, seed=1, validation=0.2)
    assert first.held_out().tolist() == again.held_out().tolist()
    assert first.held_out().tolist() != other.held_out().tolist()


def test_a_device_with_one_sample_trains_on_it() -> None:
    divided = with_validation(Partition(torch.arange(5), torch.tensor([0, 1, 3, 5])), 0.01, 0)
    assert divided.sizes().tolist() == [1, 1, 1]
    assert [len(divided.validation(device)) for device in range(3)] == [0, 1, 1]


def test_nobody_trains_on_what_another_draws_to_validate_on() -> None:
    drawn = make("draw", some_labels(50), CLASSES, 40, 3, samples_per_device=20, validation=0.3)
    held_out = set(drawn.held_out().tolist())
    assert len(held_out) == 15
    for device in range(40):
        trained, kept = drawn.shard(device).tolist(), drawn.validation(device).tolist()
        assert (len(set(trained)), len(set(kept))) == (14, 6)
        assert held_out.issuperset(kept)
        assert held_out.isdisjoint(trained)
    assert drawn.sizes().tolist() == [14] * 40


def test_a_device_that_draws_all_of_its_pool_has_all_of_both_parts() -> None:
    """So nodes with data of their own do it on Flower."""
    own = make("draw", some_labels(7), CLASSES, 3, 0, samples_per_device=7, validation=0.2)
    assert sorted([*own.shard(2).tolist(), *own.validation(2).tolist()]) == list(range(7))
    assert len(own.validation(2)) == 1


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"data.validation must be a share from 0 to below 1"):
        make("iid", some_labels(50), CLASSES, 2, 0, validation=share)
