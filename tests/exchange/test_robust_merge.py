"""Robust merging of pieces, against a slow reference that goes entry by entry."""

import json
import math
import statistics
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sizewise.errors import ConfigError
from sizewise.exchange import merge_rules, robust_merge
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.robust_rules import geometric_median, needed
from sizewise.exchange.view import Tensors, TensorSlice, View, cut, whole
from sizewise.steps.recipe import Recipe

Contribution = tuple[dict[str, Tensor], View]
RULES = [rule for rule in get_args(get_type_hints(Recipe)["merge"]) if rule != "mean"]
GOLDEN = json.loads(Path(__file__).with_name("byzfl.json").read_text())


def recipe(rule: str, **keys: Any) -> Recipe:
    return Recipe(merge=rule, **{"merge_thin": "merge", **keys})  # type: ignore[arg-type]


def merge(server: Tensors, contributions: list[Contribution], chosen: Recipe) -> dict[str, Tensor]:
    merging = merge_rules.make(chosen, server)
    for update, view in contributions:
        merging.add(update, view, 1.0)
    return merging.result()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(len(case["vectors"])))
@pytest.mark.parametrize("rule", RULES)
def test_equal_vectors_give_what_byzfl_gives(rule: str, case: dict[str, Any]) -> None:
    vectors = torch.tensor(case["vectors"], dtype=torch.float64)
    server = {"w": torch.zeros(vectors.shape[1], dtype=torch.float64)}
    bound = {"merge_bound": 2.0} if rule == "norm-bound" else {}
    chosen = recipe(rule, merge_attackers=case["attackers"], **bound)
    merged = merge(server, [({"w": v}, whole(server)) for v in vectors], chosen)["w"]
    expected = torch.tensor(case["merged"][rule], dtype=torch.float64)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(len(case["vectors"])))
def test_steps_towards_the_geometric_median_are_byzfls(case: dict[str, Any]) -> None:
    vectors = torch.tensor(case["vectors"], dtype=torch.float64)
    shares = geometric_median(vectors @ vectors.T, steps=3, smoothing=0.1)
    expected = torch.tensor(case["merged"]["geometric-median, 3 steps"], dtype=torch.float64)
    torch.testing.assert_close(shares @ vectors, expected, rtol=0, atol=1e-6)


def entries(server: Tensors, contribution: Contribution) -> dict[tuple[str, int], float]:
    """Return what a device sent, number by number, by the tensor's name and place in it."""
    update, view = contribution
    found = {}
    for local, tensor in update.items():
        place = view[local]
        flat = torch.arange(server[place.name].numel()).view(server[place.name].shape)
        numbers = TensorSlice("x", place.index).read({"x": flat}).reshape(-1).tolist()
        values = tensor.reshape(-1).tolist()
        found |= {(place.name, n): value for n, value in zip(numbers, values, strict=True)}
    return found


def reference(server: Tensors, contributions: list[Contribution], chosen: Recipe) -> dict[str, Any]:
    """Merge as docs/robustness.md says, one entry and one pair of devices at a time."""
    old = {(n, i): float(v) for n, t in server.items() for i, v in enumerate(t.reshape(-1))}
    sent = [entries(server, contribution) for contribution in contributions]
    if chosen.merge == "norm-bound":
        sent = bounded(sent, old, chosen.merge_bound)
    blocks: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for at in old:
        blocks.setdefault(tuple(k for k, own in enumerate(sent) if at in own), []).append(at)
    new, least = dict(old), 1 if chosen.merge_thin == "merge" else needed(chosen)
    for devices, places in blocks.items():
        if len(devices) >= least:
            vectors = [[sent[k][at] - old[at] for at in places] for k in devices]
            change = vector_rule(vectors, chosen)
            new |= {at: old[at] + moved for at, moved in zip(places, change, strict=True)}
    return {
        name: torch.tensor([new[name, i] for i in range(t.numel())], dtype=t.dtype).view(t.shape)
        for name, t in server.items()
    }


def bounded(sent: list[Any], old: Any, bound: float | None) -> list[Any]:
    norms = [math.sqrt(sum((v - old[at]) ** 2 for at, v in own.items())) for own in sent]
    roots = [n / math.sqrt(max(1, len(own))) for n, own in zip(norms, sent, strict=True)]
    middle = statistics.median(roots) if roots else 0.0
    shorter = []
    for own, norm in zip(sent, norms, strict=True):
        most = middle * math.sqrt(len(own)) if bound is None else bound
        factor = most / norm if norm > most else 1.0
        shorter.append({at: old[at] + factor * (v - old[at]) for at, v in own.items()})
    return shorter


def vector_rule(vectors: list[list[float]], chosen: Recipe) -> list[float]:
    count, columns = len(vectors), list(zip(*vectors, strict=True))
    cut_off = min(chosen.merge_attackers, (count - 1) // 2)
    if chosen.merge == "norm-bound":
        return [statistics.fmean(column) for column in columns]
    if chosen.merge == "median":
        return [statistics.median(column) for column in columns]
    if chosen.merge == "trimmed-mean":
        return [statistics.fmean(sorted(c)[cut_off : count - cut_off]) for c in columns]
    if chosen.merge == "krum":
        apart = [sorted(math.dist(v, w) ** 2 for w in vectors)[: count - cut_off] for v in vectors]
        sums = [sum(each) for each in apart]
        return vectors[sums.index(min(sums))]
    point = [statistics.fmean(column) for column in columns]
    for _ in range(400):
        near = [1 / max(math.dist(v, point), 1e-9) for v in vectors]
        shares = [n / sum(near) for n in near]
        point = [sum(s * x for s, x in zip(shares, c, strict=True)) for c in columns]
    return point


def indices(sizes: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Draw what a device keeps of a tensor: all of it, first entries, or listed ones."""
    part = [
        st.one_of(
            st.integers(1, size).map(lambda stop: slice(0, stop)),
            st.just(slice(None)),
            st.permutations(range(size)).flatmap(
                lambda order: st.integers(1, len(order)).map(
                    lambda count: torch.tensor(order[:count])
                )
            ),
        )
        for size in sizes
    ]
    return st.one_of(st.none(), st.tuples(*part))


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Tensors, list[Contribution]]:
    """Draw a server and the updates of some devices, each of which may lack a tensor."""
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (3, 2), "v": (4,), "s": ()}
    server = {
        n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()
    }
    contributions = []
    for _ in range(draw(st.integers(0, 7))):
        view = {
            f"local {name}": TensorSlice(name, draw(indices(shape)) if shape else None)
            for name, shape in shapes.items()
            if draw(st.booleans())
        }
        update = {
            local: tensor + torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            for local, tensor in cut(server, view).items()
        }
        contributions.append((update, view))
    return server, contributions


@pytest.mark.parametrize("rule", [r for r in RULES if r != "geometric-median"])
@given(rounds(), st.integers(1, 2), st.sampled_from(["keep", "merge"]))
def test_pieces_are_merged_as_the_reference_says(
    rule: str, drawn: tuple[Tensors, list[Contribution]], attackers: int, thin: str
) -> None:
    server, contributions = drawn
    chosen = recipe(rule, merge_attackers=attackers, merge_thin=thin)
    merged, expected = (how(server, contributions, chosen) for how in (merge, reference))
    for name in server:
        torch.testing.assert_close(merged[name], expected[name], rtol=1e-9, atol=1e-9)


@given(rounds(), st.sampled_from(["keep", "merge"]))
def test_geometric_medians_have_the_least_sum_of_distances(
    drawn: tuple[Tensors, list[Contribution]], thin: str
) -> None:
    # Of two vectors, every point between them is one: so sums are compared, not points.
    server, contributions = drawn
    chosen = recipe("geometric-median", merge_thin=thin)
    merged, expected = (how(server, contributions, chosen) for how in (merge, reference))
    sent = [entries(server, contribution) for contribution in contributions]
    sums = []
    for state in (merged, expected):
        whole_state = entries(server, (dict(state), whole(state)))
        blocks: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        for at in whole_state:
            blocks.setdefault(tuple(k for k, own in enumerate(sent) if at in own), []).append(at)
        sums.append(
            [
                sum(
                    math.dist([sent[k][at] for at in places], [whole_state[at] for at in places])
                    for k in devices
                )
                for devices, places in blocks.items()
            ]
        )
    # Weiszfeld's steps are slow near a device's own vector; 200 of them come this close.
    assert sums[0] == pytest.approx(sums[1], rel=1e-4, abs=1e-9)


@given(rounds(), st.integers(1, 40))
def test_nothing_depends_on_how_much_is_sorted_at_a_time(
    drawn: tuple[Tensors, list[Contribution]], chunk: int
) -> None:
    server, contributions = drawn
    at_once = merge(server, contributions, recipe("trimmed-mean"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust_merge, "CHUNK", chunk)
        in_parts = merge(server, contributions, recipe("trimmed-mean"))
    assert all(torch.equal(at_once[name], in_parts[name]) for name in server)


def corner(size: int) -> View:
    return {"w": TensorSlice("w", (slice(0, size),))}


@pytest.mark.parametrize(("rule", "least"), [("median", 3), ("trimmed-mean", 3), ("krum", 5)])
def test_entries_that_too_few_cover_keep_their_values_or_not(rule: str, least: int) -> None:
    server = {"w": torch.zeros(3)}
    lone: Contribution = ({"w": torch.full((3,), 100.0)}, corner(3))
    others: list[Contribution] = [({"w": torch.ones(2)}, corner(2)) for _ in range(least - 1)]
    assert needed(recipe(rule)) == least
    kept = merge_rules.make(recipe(rule, merge_thin="keep"), server)
    for update, view in [lone, *others]:
        kept.add(update, view, 1.0)
    assert kept.result()["w"].tolist() == [1, 1, 0]
    mask = kept.covered("w")
    assert isinstance(mask, Tensor)
    assert mask.tolist() == [True, True, False]
    assert merge(server, [lone, *others], recipe(rule))["w"].tolist() == [1, 1, 100]
    if rule == "trimmed-mean":  # One device fewer, and the inner entries are not safe either.
        chosen = recipe(rule, merge_thin="keep")
        assert merge(server, [lone, *others[1:]], chosen)["w"] is server["w"]


def test_honest_where_many_watch_gains_nothing_where_few_do() -> None:
    # On all that it sent, the liar is the nearest to everybody; on the outer entry it is not.
    server = {"inner": torch.zeros(50), "outer": torch.zeros(1)}
    generator = torch.Generator().manual_seed(0)
    contributions: list[Contribution] = []
    for device in range(7):
        outer = 30.0 if device == 0 else 1.0
        noise = 0.0 if device == 0 else torch.randn(50, generator=generator)
        update = {"inner": torch.ones(50) + noise, "outer": torch.tensor([outer])}
        names = ("inner", "outer") if device < 5 else ("inner",)
        contributions.append(({n: update[n] for n in names}, whole(server)))
    merged = merge(server, contributions, recipe("krum", merge_thin="keep"))
    assert merged["outer"].tolist() == [1]
    assert torch.equal(merged["inner"], contributions[0][0]["inner"])


@pytest.mark.parametrize("rule", RULES)
def test_tensors_that_nobody_moved_keep_their_bits_and_counters_go_furthest(rule: str) -> None:
    server = {"w": torch.randn(5), "v": torch.randn(2), "u": torch.randn(2), "n": torch.tensor(1)}
    update = {"w": server["w"].clone(), "v": server["v"] + 1, "n": torch.tensor(4)}
    merging = merge_rules.make(recipe(rule), server)
    for count in (4, 3, 4):
        merging.add({**update, "n": torch.tensor(count)}, whole(server), 1.0)
    merged = merging.result()
    assert merged["w"] is server["w"]
    assert merged["u"] is server["u"]
    assert merged["n"].item() == 4
    torch.testing.assert_close(merged["v"], server["v"] + 1)
    assert list(merged) == list(server)
    assert (merging.covered("w"), merging.covered("u"), merging.covered("n")) == (
        True,
        False,
        False,
    )
    assert server["n"].item() == 1


@pytest.mark.parametrize("rule", RULES)
def test_weights_buy_nothing(rule: str) -> None:
    server = {"w": torch.zeros(3)}
    results = []
    for weight in (1.0, 1e6):
        merging = merge_rules.make(recipe(rule), server)
        for value, own in ((1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (4.0, 1.0), (50.0, weight)):
            merging.add({"w": torch.full((3,), value)}, whole(server), own)
        results.append(merging.result()["w"])
    assert torch.equal(*results)


def test_norm_bound_by_hand() -> None:
    server = {"w": torch.zeros(4)}
    sent: list[Contribution] = [
        ({"w": torch.tensor([1.0, 1, 1, 1])}, corner(4)),  # root mean square 1
        ({"w": torch.tensor([2.0])}, corner(1)),  # 2, the median
        ({"w": torch.tensor([30.0, 40])}, corner(2)),  # 35.4, shortened to 2: 1.70 and 2.26
    ]
    merged = merge(server, sent, recipe("norm-bound"))["w"]
    scale = 2 * math.sqrt(2) / 50
    expected = torch.tensor([(1 + 2 + 30 * scale) / 3, (1 + 40 * scale) / 2, 1, 1])
    torch.testing.assert_close(merged, expected)
    fixed = merge(server, sent, recipe("norm-bound", merge_bound=2.0))["w"]
    torch.testing.assert_close(fixed, torch.tensor([(1 + 2 + 1.2) / 3, (1 + 1.6) / 2, 1, 1]))


def test_mean_is_the_streaming_one() -> None:
    assert isinstance(merge_rules.make(Recipe(), {}), CoverageMean)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"merge_attackers": 0}, "must be at least 1"),
        ({"merge": "median", "merge_bound": 1.0}, "'norm-bound' only"),
        ({"merge": "norm-bound", "merge_bound": 0.0}, "must be positive"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**keys)
