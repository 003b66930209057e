import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics import f1_score
from sklearn.metrics import f1_score as binary_f1
from sklearn.metrics import matthews_corrcoef

from sizewise.steps.metrics import METRICS, count, entities, hits, perplexity, value
from sizewise.steps.step import IGNORED

TAGS = ("O", "B-ADE", "I-ADE", "B-DRUG", "I-DRUG")


def logits(guesses: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(guesses, classes).float()


def test_exact_numbers() -> None:
    truth = torch.tensor([0, 0, 1, 1, 1])
    outputs = logits(torch.tensor([0, 1, 1, 1, 0]), 2)
    assert count("accuracy", outputs, truth, "ab") == [3, 5]
    assert value("accuracy", [3, 5]) == 0.6
    # True positives 2, false positives 1, false negatives 1.
    assert count("f1", outputs, truth, "ab") == [1, 1, 1, 2]
    assert value("f1", [1, 1, 1, 2]) == pytest.approx(2 / 3)
    assert value("matthews", [1, 1, 1, 2]) == pytest.approx((1 * 2 - 1 * 1) / math.sqrt(36))


def test_what_is_not_defined_is_zero() -> None:
    assert value("f1", [5, 0, 0, 0]) == 0
    assert value("pearson", [3, math.nan, 1, math.inf, 2, math.nan]) == 0
    assert value("matthews", [3, 0, 2, 0]) == 0  # One class only was guessed.
    assert value("pearson", count("pearson", torch.ones(4, 1), torch.arange(4.0), "s")) == 0
    assert value("entities", [0, 0, 0]) == 0


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=40))
def test_matthews_is_that_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth, guesses = torch.tensor(pairs).T
    found = value("matthews", count("matthews", logits(guesses, 3), truth, "abc"))
    assert found == pytest.approx(matthews_corrcoef(truth, guesses), abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40))
def test_f1_is_that_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth, guesses = torch.tensor(pairs).T
    found = value("f1", count("f1", logits(guesses, 2), truth, "ab"))
    assert found == pytest.approx(binary_f1(truth, guesses, zero_division=0), abs=1e-12)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=40))
def test_pearson_is_that_of_torch(pairs: list[tuple[float, float]]) -> None:
    table = torch.tensor(pairs, dtype=torch.float32).T
    found = value("pearson", count("pearson", table[0, :, None], table[1], "s"))
    if min(table.double().std(1)) > 1e-3:
        assert found == pytest.approx(float(torch.corrcoef(table.double())[0, 1]), abs=1e-6)


sentences = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9),
    min_size=1,
    max_size=5,
)


@given(sentences)
@pytest.mark.filterwarnings("ignore")
def test_entities_are_those_of_seqeval(rows: list[list[tuple[int, int]]]) -> None:
    length = max(map(len, rows))
    truth = torch.full((len(rows), length), IGNORED)
    guesses = torch.zeros(len(rows), length, dtype=torch.int64)
    for number, row in enumerate(rows):
        truth[number, : len(row)] = torch.tensor([true for true, _ in row])
        guesses[number, : len(row)] = torch.tensor([guess for _, guess in row])
    found = value("entities", count("entities", logits(guesses, 5), truth, TAGS))
    named = [[[TAGS[pair[side]] for pair in row] for row in rows] for side in (0, 1)]
    assert found == pytest.approx(f1_score(*named, zero_division=0), abs=1e-12)


def test_entities_pass_over_places_without_a_tag() -> None:
    row = [IGNORED, 1, IGNORED, 2, IGNORED, 0, 4, IGNORED]
    assert entities([row], TAGS) == {(0, 1, 3, "ADE"), (0, 6, 6, "DRUG")}


@pytest.mark.parametrize("metric", sorted({name for names in METRICS.values() for name in names}))
def test_sums_over_parts_are_sums_over_the_whole(metric: str) -> None:
    generator = torch.Generator().manual_seed(0)
    if metric == "pearson":
        outputs, truth = torch.randn(20, 1, generator=generator), torch.randn(20)
    elif metric == "entities":
        outputs = torch.randn(20, 6, 5, generator=generator)
        truth = torch.randint(5, (20, 6), generator=generator)
    else:
        outputs = torch.randn(20, 2, generator=generator)
        truth = torch.randint(2, (20,), generator=generator)
    names = TAGS if metric == "entities" else ("a", "b")
    parts = [count(metric, outputs[i : i + 7], truth[i : i + 7], names) for i in (0, 7, 14)]
    added = [sum(each) for each in zip(*parts, strict=True)]
    assert value(metric, added) == pytest.approx(
        value(metric, count(metric, outputs, truth, names))
    )


def test_hits_of_each_sample() -> None:
    truth = torch.tensor([0, 0, 1])
    assert hits(logits(torch.tensor([0, 1, 1]), 2), truth).tolist() == [[1, 1], [0, 1], [1, 1]]
    tags = torch.tensor([[0, 1, IGNORED], [2, 2, 2]])
    guesses = logits(torch.tensor([[0, 2, 0], [2, 2, 1]]), 3)
    assert hits(guesses, tags).tolist() == [[1, 2], [2, 3]]
    # Two label sets of two places: sample 0 is of the first, sample 1 of the second.
    outputs = torch.tensor([[[1.0, 0], [0, 1]], [[1, 0], [0, 1]]])
    assert hits(outputs, torch.tensor([0, 3]), sets=2).tolist() == [[1, 1], [1, 1]]
    assert hits(outputs, torch.tensor([1, 2]), sets=2).tolist() == [[0, 1], [0, 1]]


def test_likelihood_is_one_over_perplexity() -> None:
    probabilities = torch.tensor([[[0.5, 0.5], [0.2, 0.8]], [[0.9, 0.1], [0.3, 0.7]]])
    targets = torch.tensor([[0, 1], [IGNORED, 0]])
    counts = count("likelihood", probabilities.log(), targets, ("next",))
    assert counts[1] == 3
    found = value("likelihood", counts)
    assert found == pytest.approx((0.5 * 0.8 * 0.3) ** (1 / 3))
    assert perplexity(found) == pytest.approx(1 / found)
    assert perplexity(0.0) is None
