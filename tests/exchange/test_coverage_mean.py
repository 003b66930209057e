from collections.abc import Iterator
from itertools import product
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sizewise.exchange import coverage_mean
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.view import Tensors, TensorSlice, View, cut, size_in_bytes, whole

Contribution = tuple[dict[str, Tensor], View, float]


def merge(server: Tensors, contributions: list[Contribution]) -> dict[str, Tensor]:
    mean = CoverageMean(server)
    for update, view, weight in contributions:
        mean.add(update, view, weight)
    return mean.result()


def corner(size: int) -> TensorSlice:
    return TensorSlice("w", (slice(0, size), slice(0, size)))


def test_nested_widths_by_hand() -> None:
    server = {"w": torch.full((3, 3), 9.0)}
    small, large = {"w": torch.full((1, 1), 4.0)}, {"w": torch.full((2, 2), 1.0)}
    merged = merge(server, [(small, {"w": corner(1)}, 2.0), (large, {"w": corner(2)}, 1.0)])
    assert merged["w"].tolist() == [[3, 1, 9], [1, 1, 9], [9, 9, 9]]


def test_whole_and_partial_updates_by_hand_in_either_order() -> None:
    server = {"w": torch.zeros(3)}
    full: Contribution = ({"w": torch.tensor([3.0, 3, 3])}, {"w": TensorSlice("w")}, 1.0)
    part: Contribution = ({"w": torch.tensor([6.0])}, {"w": TensorSlice("w", (slice(2, 3),))}, 2.0)
    for contributions in ([full, part], [part, full]):
        assert merge(server, contributions)["w"].tolist() == [3, 3, 5]


def test_equal_weights_are_the_plain_mean() -> None:
    server = {"w": torch.zeros(2)}
    values = ([1.0, 2.0], [3.0, 6.0])
    contributions = [({"w": torch.tensor(v)}, whole(server), 1.0) for v in values]
    assert merge(server, contributions)["w"].tolist() == [2, 4]


def test_whole_updates_are_a_running_sum_to_the_bit() -> None:
    # Runs in which all devices hold the whole model must not depend on how parts are merged.
    server = {"w": torch.zeros(7, 5)}
    generator = torch.Generator().manual_seed(0)
    updates = [torch.randn(7, 5, generator=generator) for _ in range(20)]
    weights = [0.1 * n for n in range(1, 21)]
    total = torch.zeros(7, 5)
    for update, weight in zip(updates, weights, strict=True):
        total.add_(update, alpha=weight)
    contributions = [({"w": u}, whole(server), w) for u, w in zip(updates, weights, strict=True)]
    assert torch.equal(merge(server, contributions)["w"], total / sum(weights))


def test_coverage_is_a_flag_or_a_mask_of_the_tensors_shape() -> None:
    server = {"w": torch.zeros(3, 2), "v": torch.zeros(2), "n": torch.tensor(0)}
    mean = CoverageMean(server)
    assert mean.covered("w") is False
    mean.add({"w": torch.ones(1, 2)}, {"w": TensorSlice("w", (slice(1, 2), slice(None)))}, 1.0)
    mean.add({"v": torch.ones(2), "n": torch.tensor(3)}, whole(server), 1.0)
    mask = mean.covered("w")
    assert isinstance(mask, Tensor)
    assert mask.tolist() == [[False, False], [True, True], [False, False]]
    assert mean.covered("v") is True


def test_rows_that_nobody_owns_keep_their_bits() -> None:
    # Classifier rows under label masking: a device sends the rows of its classes.
    server = {"head": torch.randn(5, 4), "bias": torch.randn(5)}
    contributions = []
    for classes in ([3, 0], [0, 4]):
        rows = torch.tensor(classes)
        view = {
            "head": TensorSlice("head", (rows, slice(None))),
            "bias": TensorSlice("bias", (rows,)),
        }
        update = {name: tensor + 1 for name, tensor in cut(server, view).items()}
        contributions.append((update, view, 1.0))
    merged = merge(server, contributions)
    for name, tensor in server.items():
        assert torch.equal(merged[name][[1, 2]], tensor[[1, 2]])
        torch.testing.assert_close(merged[name][[0, 3, 4]], tensor[[0, 3, 4]] + 1)


def test_tensor_that_nobody_sent_is_passed_on_itself() -> None:
    server = {"w": torch.randn(2), "frozen": torch.randn(2)}
    merged = merge(server, [({"w": torch.ones(2)}, whole(server), 1.0)])
    assert merged["frozen"] is server["frozen"]
    assert list(merged) == ["w", "frozen"]


@given(st.lists(st.integers(1, 99), min_size=1, max_size=5), st.sampled_from([2, 50, 96]))
def test_tensor_that_comes_back_as_it_was_keeps_its_bits(weights: list[int], size: int) -> None:
    server = {"w": torch.randn(96, 2), "v": torch.randn(96)}
    views: list[View] = [
        {"w": TensorSlice("w", (slice(0, size), slice(None)))},
        {"w": TensorSlice("w", (torch.arange(0, 96, 3), slice(None)))},
        whole(server),
    ]
    parts = [(cut(server, views[n % 3]), views[n % 3], float(w)) for n, w in enumerate(weights)]
    merged = merge(server, parts)
    assert merged["w"] is server["w"]
    assert merged["v"] is server["v"]
    moved = {**parts[0][0], "w": parts[0][0]["w"] + 1}
    assert merge(server, [(moved, *parts[0][1:])])["w"] is not server["w"]


def test_without_updates_nothing_changes() -> None:
    server = {"w": torch.randn(2)}
    assert merge(server, [])["w"] is server["w"]


def test_server_tensors_are_not_written_to() -> None:
    server = {"w": torch.zeros(3), "n": torch.tensor(1)}
    update = {"w": torch.ones(3), "n": torch.tensor(5)}
    merge(server, [(update, whole(server), 2.0)] * 2)
    assert server["w"].tolist() == [0, 0, 0]
    assert server["n"].item() == 1
    assert update["w"].tolist() == [1, 1, 1]


def test_counters_take_the_furthest() -> None:
    server = {"n": torch.tensor(1)}
    contributions = [({"n": torch.tensor(n)}, whole(server), w) for n, w in ((4, 1.0), (3, 9.0))]
    merged = merge(server, contributions)["n"]
    assert merged.item() == 4
    assert merged.dtype == torch.int64


def test_counters_are_merged_through_a_view() -> None:
    server = {"n": torch.tensor([1, 1, 1])}
    low: Contribution = ({"n": torch.tensor([5, 2])}, {"n": TensorSlice("n", (slice(0, 2),))}, 1.0)
    high: Contribution = (
        {"n": torch.tensor([3])},
        {"n": TensorSlice("n", (torch.tensor([1]),))},
        1.0,
    )
    assert merge(server, [low, high])["n"].tolist() == [5, 3, 1]


def test_uncovered_nan_does_not_spread() -> None:
    server = {"w": torch.tensor([torch.nan, 0.0])}
    merged = merge(server, [({"w": torch.ones(1)}, {"w": TensorSlice("w", (slice(1, 2),))}, 1.0)])[
        "w"
    ]
    assert merged.isnan().tolist() == [True, False]
    assert merged[1] == 1


# ---- properties


@st.composite
def index_of(draw: st.DrawFn, size: int) -> "slice | Tensor":
    """Some entries of a dimension: a slice, or a list without repetition."""
    if draw(st.booleans()):
        start = draw(st.integers(0, size - 1))
        return slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 2)))
    return torch.tensor(draw(st.permutations(range(size)))[: draw(st.integers(1, size))])


@st.composite
def slots(draw: st.DrawFn, name: str, shape: tuple[int, ...]) -> TensorSlice:
    if draw(st.integers(0, 3)) == 0:
        return TensorSlice(name)
    return TensorSlice(name, tuple(draw(index_of(size)) for size in shape))


@st.composite
def rounds(draw: st.DrawFn, clients: int = 4) -> tuple[dict[str, Tensor], list[Contribution]]:
    """Server tensors and what some clients send back through random views of them."""
    shapes = draw(st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    server = {f"t{i}": torch.randn(s, generator=generator) for i, s in enumerate(shapes)}
    contributions: list[Contribution] = []
    for _ in range(draw(st.integers(1, clients))):
        held = [name for name in server if draw(st.booleans())]
        view = {f"my.{n}": draw(slots(n, tuple(server[n].shape))) for n in held}
        pieces = cut(server, view).items()
        update = {local: torch.randn(t.shape, generator=generator) for local, t in pieces}
        contributions.append((update, view, draw(st.floats(0.5, 100))))
    return server, contributions


def entries(
    slot: TensorSlice, shape: torch.Size
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield each local place of a slot with its place on the server, one by one."""
    parts = slot.index if slot.index is not None else tuple(slice(None) for _ in shape)
    kept = [
        list(range(size))[part] if isinstance(part, slice) else part.tolist()
        for part, size in zip(parts, shape, strict=True)
    ]
    for local in product(*(range(len(places)) for places in kept)):
        yield local, tuple(places[i] for places, i in zip(kept, local, strict=True))


def slow_merge(
    server: Tensors, contributions: list[Contribution]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The definition, entry by entry, in double precision; and which entries were covered."""
    result, covered = {}, {}
    for name, old in server.items():
        sums, weights = torch.zeros(old.shape).double(), torch.zeros(old.shape).double()
        for update, view, weight in contributions:
            for local, slot in view.items():
                if slot.name == name:
                    for here, there in entries(slot, old.shape):
                        sums[there] += weight * update[local][here].double()
                        weights[there] += weight
        new = old.clone()
        for place in product(*map(range, old.shape)):
            if weights[place] > 0:
                new[place] = (sums[place] / weights[place]).float()
        result[name], covered[name] = new, weights > 0
    return result, covered


@given(rounds(clients=6), st.integers(0, 4))
def test_merge_is_the_definition_entry_by_entry(
    case: tuple[dict[str, Tensor], list[Contribution]], most_indices: int
) -> None:
    server, contributions = case
    expected, covered = slow_merge(server, contributions)
    mean = CoverageMean(server)
    with patch.object(coverage_mean, "_MOST_INDICES", most_indices):
        for contribution in contributions:
            mean.add(*contribution)
    merged = mean.result()
    assert list(merged) == list(server)
    for name in server:
        torch.testing.assert_close(merged[name], expected[name], rtol=1e-5, atol=1e-5)
        mask = mean.covered(name)
        if isinstance(mask, Tensor):
            assert torch.equal(mask, covered[name])
        else:
            assert (covered[name] == mask).all()


@given(rounds(), st.integers(0, 2))
def test_asking_in_between_changes_no_bit(
    case: tuple[dict[str, Tensor], list[Contribution]], most_indices: int
) -> None:
    server, contributions = case
    asked, quiet = CoverageMean(server), CoverageMean(server)
    with patch.object(coverage_mean, "_MOST_INDICES", most_indices):
        for contribution in contributions:
            asked.add(*contribution)
            quiet.add(*contribution)
            asked.result()
    again = asked.result()
    assert all(torch.equal(again[name], tensor) for name, tensor in quiet.result().items())


@given(rounds(), st.randoms())
def test_order_of_clients_changes_only_rounding(
    case: tuple[dict[str, Tensor], list[Contribution]], random: object
) -> None:
    server, contributions = case
    merged = merge(server, contributions)
    shuffled = list(contributions)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for name, tensor in merge(server, shuffled).items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-5)


@given(rounds(clients=1))
def test_one_client_of_weight_one_puts_its_bits_where_they_belong(
    case: tuple[dict[str, Tensor], list[Contribution]],
) -> None:
    server, [(update, view, _)] = case
    merged = merge(server, [(update, view, 1.0)])
    for local, slot in view.items():
        assert torch.equal(slot.read(merged), update[local])
        covered = torch.zeros(server[slot.name].shape, dtype=torch.bool)
        for _, there in entries(slot, covered.shape):
            covered[there] = True
        assert torch.equal(merged[slot.name][~covered], server[slot.name][~covered])


@given(rounds(clients=1))
def test_cut_then_merge_is_the_identity(
    case: tuple[dict[str, Tensor], list[Contribution]],
) -> None:
    server, [(_, view, _)] = case
    merged = merge(server, [(cut(server, view), view, 1.0)])
    assert all(torch.equal(merged[name], server[name]) for name in server)


# ---- what is held


def bytes_held(thing: object) -> int:
    """Count the tensors, and the bytes of indices, that an object holds on to."""
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, bytes):
        return len(thing)
    if isinstance(thing, dict):
        return sum(map(bytes_held, [*thing.keys(), *thing.values()]))
    if isinstance(thing, tuple | list):
        return sum(map(bytes_held, thing))
    return bytes_held(vars(thing)) if hasattr(thing, "__dict__") else 0


def test_memory_does_not_grow_with_the_clients() -> None:
    server = {"w": torch.randn(64, 32, 3, 3), "b": torch.randn(64)}
    generator = torch.Generator().manual_seed(0)
    mean = CoverageMean(server)
    held = []
    for _ in range(200):
        rows, columns = (torch.randperm(n, generator=generator)[: n // 2] for n in (64, 32))
        view = {
            "w": TensorSlice("w", (rows, columns, slice(None), slice(None))),
            "b": TensorSlice("b", (rows,)),
        }
        mean.add(cut(server, view), view, 1.0)
        held.append(bytes_held(mean) - size_in_bytes(server))
    assert max(held[20:]) == max(held[:20])
    # The sums, a weight for each kernel of nine, and a few indices.
    assert max(held) < 1.3 * size_in_bytes(server)


def test_equal_indices_are_remembered_once() -> None:
    server = {"w": torch.zeros(100, 100)}
    mean = CoverageMean(server)
    for _ in range(50):
        mean.add({"w": torch.ones(60, 60)}, {"w": corner(60)}, 1.0)
    # No weight was spread over the entries yet: one tensor besides the server's.
    assert bytes_held(mean) == 2 * size_in_bytes(server) + 4
