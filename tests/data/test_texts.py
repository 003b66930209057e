import csv
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from sizewise.data import sources
from sizewise.data.dataset import Dataset
from sizewise.data.texts import first_pieces, next_tokens
from sizewise.errors import ConfigError, DataError
from sizewise.steps.step import IGNORED
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
    assert found.train_inputs.tolist() == [[2, 4, 6, 3, 0, 0], [2, 7, 8, 6, 1, 3]]
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
    assert found.train_inputs.tolist() == [[2, 4, 3, 5, 6, 3], [2, 5, 3, 6, 3, 0]]
    # In units of the training set's mean and deviation.
    assert (found.train_labels.dtype, found.train_labels.tolist()) == (torch.float32, [1.0, -1.0])
    assert (found.target, found.metric, found.classes) == ("score", "pearson", 1)


def test_words_with_tags(tmp_path: Path, tokenizer: str) -> None:
    tags = datasets.ClassLabel(names=["O", "B-X", "I-X"])
    features = {"tokens": datasets.Sequence(TEXT), "ner_tags": datasets.Sequence(tags)}
    rows = {"tokens": [["good", "uneven", "film", "bad"]], "ner_tags": [[0, 1, 2, 0]]}
    found = load(write_parquet(tmp_path / "tagged", features, train=rows, test=rows), tokenizer)
    assert found.train_inputs.tolist() == [[2, 4, 7, 8, 6, 3]]  # "bad" is cut off.
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
        DataError, match=r"films, train holds texts, which need a tokenizer; set data\.tok"
    ):
        load(path, None)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"broken\.json is no tokenizer"):
        load(path, str(tmp_path / "broken.json"))
    lonely = write_parquet(tmp_path / "lonely", features, train=rows)
    with pytest.raises(DataError, match=r"has no test set, and data\.holdout is 0"):
        load(lonely, tokenizer, holdout=0.0)
    unlabelled = write_parquet(tmp_path / "raw", {"sentence": TEXT}, train={"sentence": ["good"]})
    with pytest.raises(DataError, match=r"has no label column .*, only sentence; say which"):
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


# Words for labels, and other files than parquet

ROWS = {"text": ["good film", "bad film", "uneven"], "label": ["pos", "neg", "neg"]}


def write(folder: Path, **files: str) -> str:
    """Write files such as `train_csv`, and return their folder."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return str(folder)


def lines(rows: dict[str, list[Any]]) -> str:
    """Return columns as JSON lines."""
    made = (dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True))
    return "".join(json.dumps(row) + "\n" for row in made)


def table(rows: dict[str, list[Any]]) -> str:
    """Return columns as CSV."""
    file = io.StringIO()
    csv.writer(file).writerows([rows, *zip(*rows.values(), strict=True)])
    return file.getvalue()


@pytest.mark.parametrize("kind", ["parquet", "large", "dictionary", "csv", "jsonl", "mixed"])
def test_words_for_classes_in_any_file(tmp_path: Path, tokenizer: str, kind: str) -> None:
    test = {"text": ["bad", "good"], "label": ["neg", "pos"]}
    text, label = pyarrow.string(), pyarrow.string()
    if kind == "large":  # what pandas and polars write
        text = label = pyarrow.large_string()
    if kind == "dictionary":  # what pandas writes for categories
        label = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
    schema = pyarrow.schema({"text": text, "label": label})
    path = tmp_path / "films"
    if kind in ("csv", "jsonl"):
        made = table if kind == "csv" else lines
        write(path, **{f"train_{kind}": made(ROWS), f"test_{kind}": made(test)})
    elif kind == "mixed":
        write(path, train_jsonl=lines(ROWS), test_csv=table(test))
    else:
        path.mkdir()
        for split, rows in (("train", ROWS), ("test", test)):
            pyarrow.parquet.write_table(pyarrow.table(rows, schema), path / f"{split}.parquet")
    found = load(str(path), tokenizer)
    assert found.train_inputs.tolist() == [
        [2, 4, 6, 3, 0, 0],
        [2, 5, 6, 3, 0, 0],
        [2, 7, 8, 3, 0, 0],
    ]
    assert (found.class_names, found.train_labels.tolist()) == (("neg", "pos"), [1, 0, 0])
    by_text = dict(zip(found.test_inputs[:, 1].tolist(), found.test_labels.tolist(), strict=True))
    assert by_text == {5: 0, 4: 1}
    assert load(str(path), tokenizer).fingerprint() == found.fingerprint()  # From the cache.


def test_several_files_are_one_split_and_quotes_are_understood(
    tmp_path: Path, tokenizer: str
) -> None:
    folder = tmp_path / "films"
    write(folder, test_csv='label,text\n1,"good\nfilm, film"\n')
    for number, row in enumerate(('0,"bad, ""film"""', "1,good")):
        (folder / f"train-{number}.csv").write_text(f"label,text,year\n{row},1999\n")
    found = load(str(folder), tokenizer)
    assert found.train_inputs.tolist() == [[2, 5, 1, 1, 6, 3], [2, 4, 3, 0, 0, 0]]
    assert (found.train_labels.tolist(), found.class_names) == ([0, 1], ("0", "1"))
    assert found.test_inputs.tolist() == [[2, 4, 6, 1, 6, 3]]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_long_rows_and_a_word_at_the_end(tmp_path: Path, tokenizer: str, kind: str) -> None:
    # Arrow's blocks are of a million bytes; a column's type is that of all of its values.
    rows = {"id": ["x" * 2_500_000] * 3, "text": ["12", "12", "good"], "label": ["0", "0", "last"]}
    made = table if kind == "csv" else lines
    path = write(tmp_path / "films", **{f"{s}_{kind}": made(rows) for s in ("train", "test")})
    found = load(path, tokenizer)
    assert (found.class_names, found.train_labels.tolist()) == (("0", "last"), [0, 0, 1])


def test_truth_and_scores_in_json_lines(tmp_path: Path, tokenizer: str) -> None:
    rows = {"a": ["good", "bad"], "b": ["film", "film"], "label": [0.5, 2]}
    found = load(write(tmp_path / "s", train_jsonl=lines(rows), test_jsonl=lines(rows)), tokenizer)
    assert (found.target, found.train_labels.tolist()) == ("score", [-1.0, 1.0])
    rows["label"] = [True, False]
    found = load(write(tmp_path / "t", train_jsonl=lines(rows), test_jsonl=lines(rows)), tokenizer)
    assert (found.class_names, found.train_labels.tolist()) == (("false", "true"), [1, 0])


def test_words_for_tags(tmp_path: Path, tokenizer: str) -> None:
    rows = {"tokens": [["good", "uneven"], ["film"]], "ner_tags": [["O", "B-X"], ["O"]]}
    path = write(tmp_path / "tagged", train_jsonl=lines(rows), test_jsonl=lines(rows))
    found = load(path, tokenizer)
    assert (found.target, found.class_names) == ("tags", ("B-X", "O"))
    assert found.train_labels[0].tolist() == [IGNORED, 1, 0, IGNORED, IGNORED, IGNORED]


def test_numbers_of_named_classes_stay_what_they_are(tmp_path: Path, tokenizer: str) -> None:
    features = {"text": TEXT, "label": datasets.ClassLabel(names=["2", "1"])}
    rows = {"text": ["good", "bad"], "label": [0, 1]}
    path = write_parquet(tmp_path / "films", features, train=rows, test=rows)
    found = load(path, tokenizer)
    assert (found.class_names, found.train_labels.tolist()) == (("2", "1"), [0, 1])


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            "a,neg\nb,pos",
            "a,meh",
            r"bad, test: no training sample has .* 'meh'; .* neg, pos:",
        ),
        ("a,0\nb,1", "a,meh", "no training sample has the label 'meh'"),
        ("a,0\nb,", "a,0", "bad, train: row 2 has no label"),
        ("a,0\nb,1,2", "a,0", "Expected 2 columns, got 3"),
        ("1,0\n2,1", "good,0", "training inputs are torch.float32, test inputs torch.int64"),
    ],
)
def test_rows_that_cannot_be_used(
    tmp_path: Path, tokenizer: str, train: str, test: str, message: str
) -> None:
    header = "text,label\n"
    path = write(tmp_path / "bad", train_csv=header + train, test_csv=header + test)
    with pytest.raises(DataError, match=message) as caught:
        load(path, tokenizer)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, tokenizer: str) -> None:
    latin = Path(write(tmp_path / "latin", test_csv="text,label\na,0\n"))
    (latin / "train.csv").write_bytes("text,label\nété,0\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"train\.csv is not in UTF-8"):
        load(str(latin), tokenizer)
    broken = write(tmp_path / "broken", train_jsonl='{"text": "a"', test_jsonl="{}")
    with pytest.raises(DataError, match="JSON parse error"):
        load(broken, tokenizer)


def test_labels_can_be_numbered_as_others_number_them() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    labels = torch.tensor([0, 1, 1])
    facts: dict[str, Any] = {"mean": (), "std": (), "vocabulary": 1}
    own = Dataset("own", ids, labels, ids, labels, ("good", "ugly"), **facts)
    found = own.in_classes(("bad", "good", "ugly"))
    assert found.train_labels.tolist() == found.test_labels.tolist() == [1, 2, 2]
    assert own.in_classes(("good", "ugly", "more")).train_labels.tolist() == [0, 1, 1]
    numbered = Dataset("own", ids, labels, ids, labels, ("0", "1"), **facts)
    assert numbered.in_classes(("bad", "good", "ugly")).train_labels.tolist() == [0, 1, 1]
    with pytest.raises(DataError, match="own has the class 'ugly', and the others have bad, good"):
        own.in_classes(("bad", "good"))


def test_next_tokens_end_with_the_text() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]])
    assert next_tokens(ids, 0).tolist() == [[6, 7, IGNORED, IGNORED], [6, 7, 8, IGNORED]]


def test_texts_without_labels(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "good film"}, {"text": "bad film bad"}] * 4
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = load(str(tmp_path), tokenizer, target="next")
    assert (found.target, found.metric, found.classes) == ("next", "likelihood", 9)
    assert found.train_labels.shape == found.train_inputs.shape
    assert found.train_labels[0, 0] == found.train_inputs[0, 1]
    numbers = tmp_path / "numbers"
    numbers.mkdir()
    (numbers / "train.csv").write_text("a,label\n1,0\n2,1\n")
    with pytest.raises(DataError, match="no column of texts, only a, label"):
        load(str(numbers), tokenizer, target="next")
