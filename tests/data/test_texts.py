from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from sizewise.data import sources
from sizewise.data.dataset import Dataset
from sizewise.data.texts import first_pieces
from sizewise.errors import ConfigError, DataError
from sizewise.step import IGNORED
from text_cases import write_parquet, write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Return a tokenizer with nine words."""
    return write_tokenizer(tmp_path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZEWISE_CACHE", str(tmp_path / "cache"))


def load(path: str, tokenizer: str | None, **options: Any) -> Dataset:
    return sources.load(path, tokenizer=tokenizer, **{"max_tokens": 6, **options})


TEXT, CLASS = datasets.Value("string"), datasets.ClassLabel(names=["no", "yes"])


def test_sentences_with_classes(tmp_path: Path, tokenizer: str) -> None:
    features = {"sentence": TEXT, "label": CLASS, "idx": datasets.Value("int32")}
    rows = {"sentence": ["good film", "uneven film, bad film, bad"], "label": [1, 0], "idx": [0, 1]}
    path = write_parquet(tmp_path / "films", features, train=rows, test=rows)
    found = load(path, tokenizer)
    assert found.train_images.tolist() == [[2, 4, 6, 3, 0, 0], [2, 7, 8, 6, 1, 3]]
    assert found.train_labels.tolist() == [1, 0]
    assert (found.shape, found.vocabulary, found.class_names) == ((6,), 9, ("no", "yes"))
    assert (found.target, found.metric) == ("class", "accuracy")
    again = load(path, tokenizer)  # From the cache.
    assert again.fingerprint() == found.fingerprint()
    assert load(path, tokenizer, max_tokens=4).shape == (4,)
    assert load(path, tokenizer, metric="matthews").metric == "matthews"
    with pytest.raises(ConfigError, match="is one of accuracy, matthews, f1, not 'pearson'"):
        load(path, tokenizer, metric="pearson")


def test_pairs_with_scores(tmp_path: Path, tokenizer: str) -> None:
    features = {"sentence1": TEXT, "sentence2": TEXT, "label": datasets.Value("float32")}
    texts = {"sentence1": ["good", "bad"], "sentence2": ["bad film", "film"]}
    rows = {**texts, "label": [4.0, 1.0]}
    found = load(
        write_parquet(tmp_path / "pairs", features, train=rows, validation=rows), tokenizer
    )
    assert found.train_images.tolist() == [[2, 4, 3, 5, 6, 3], [2, 5, 3, 6, 3, 0]]
    # In units of the training set's mean and deviation.
    assert (found.train_labels.dtype, found.train_labels.tolist()) == (torch.float32, [1.0, -1.0])
    assert (found.target, found.metric, found.classes) == ("score", "pearson", 1)


def test_words_with_tags(tmp_path: Path, tokenizer: str) -> None:
    tags = datasets.ClassLabel(names=["O", "B-X", "I-X"])
    features = {"tokens": datasets.Sequence(TEXT), "ner_tags": datasets.Sequence(tags)}
    rows = {"tokens": [["good", "uneven", "film", "bad"]], "ner_tags": [[0, 1, 2, 0]]}
    found = load(write_parquet(tmp_path / "tagged", features, train=rows, test=rows), tokenizer)
    assert found.train_images.tolist() == [[2, 4, 7, 8, 6, 3]]  # "bad" is cut off.
    assert found.train_labels.tolist() == [[IGNORED, 0, 1, IGNORED, 2, IGNORED]]
    assert (found.target, found.metric, found.class_names) == (
        "tags",
        "entities",
        ("O", "B-X", "I-X"),
    )


def test_a_word_has_its_tag_at_its_first_piece() -> None:
    assert first_pieces([None, 0, 0, 1, 2, 2, None], [5, 6, 7]) == [
        *(IGNORED, 5, IGNORED, 6, 7, IGNORED, IGNORED)
    ]


def test_errors_say_what_to_do(tmp_path: Path, tokenizer: str) -> None:
    features = {"sentence": TEXT, "label": CLASS}
    rows = {"sentence": ["good"], "label": [1]}
    path = write_parquet(tmp_path / "films", features, train=rows, test=rows)
    with pytest.raises(
        DataError, match=r"films holds texts, which need a tokenizer; set data\.tok"
    ):
        load(path, None)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"broken\.json is no tokenizer"):
        load(path, str(tmp_path / "broken.json"))
    lonely = write_parquet(tmp_path / "lonely", features, train=rows)
    with pytest.raises(DataError, match="needs a train split and one of test, validation"):
        load(lonely, tokenizer)
    unlabelled = write_parquet(tmp_path / "raw", {"sentence": TEXT}, train={"sentence": ["good"]})
    with pytest.raises(DataError, match="has texts \\(sentence\\) but no column 'label'"):
        load(unlabelled, tokenizer)
    hidden = write_parquet(
        tmp_path / "hidden", features, train=rows, test={"sentence": ["a"], "label": [-1]}
    )
    with pytest.raises(DataError, match="use a split whose labels are public"):
        load(hidden, tokenizer)


def test_datasets_of_texts_are_checked() -> None:
    ids, tags = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    facts: dict[str, Any] = {"class_names": ("O",), "mean": (), "std": (), "vocabulary": 1}
    facts |= {"target": "tags", "metric": "entities"}
    Dataset("fine", ids, tags, ids, tags, **facts)
    for bad, message in (
        ((ids.float(), tags, ids, tags), "train texts must be int64 token ids"),
        ((ids + 1, tags, ids, tags), r"token ids must lie in 0..0, got 1..1"),
        ((ids, tags[:, 0], ids, tags), r"expected torch.int64 labels \(2, 3\) for train texts"),
        ((ids, tags, ids, tags + 1), "test tags must lie in 0..0, or be -100"),
    ):
        with pytest.raises(DataError, match=message):
            Dataset("bad", *bad, **facts)
    with pytest.raises(ConfigError, match=r"recipe\.augment = 'flip' is for images"):
        Dataset("fine", ids, tags, ids, tags, **facts).transform("flip")
