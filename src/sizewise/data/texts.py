"""From the splits of a Hugging Face data set of texts to token ids, a thousand texts at a time.

Two kinds are understood: one or two columns of text with a class or a score, as in GLUE; and lists
of words with a tag for each, as in named entity recognition. Classes without a number get one in
the order of their names. All texts are cut and padded to one length, because what a training step
costs must not depend on the data.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sizewise.data import pretrained
from sizewise.data.catalog import Source
from sizewise.data.dataset import Dataset, Target
from sizewise.data.decode import BATCH, TEST_SPLITS, Split
from sizewise.errors import DataError
from sizewise.steps.metrics import METRICS
from sizewise.steps.step import IGNORED

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TAG_COLUMNS = ("ner_tags", "tags", "labels", "label")
"""Where lists of tags are looked for that are words, as the tokens beside them are."""


class Columns(NamedTuple):
    """Which columns hold what: one or two texts, or a list of words; and the labels.

    ``names`` is empty for scores, and for classes that have to be found among the labels.
    """

    texts: tuple[str, ...]
    label: str
    target: Target
    names: tuple[str, ...]


def tokenizer(name: str) -> "Tokenizer":
    """Return a tokenizer, given a ``tokenizer.json`` or what ``pretrained.folder`` takes."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError("texts need the package tokenizers; pip install 'sizewise[text]'") from None

    path = tokenizer_file(name)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain exceptions.
        raise DataError(f"{path} is no tokenizer ({error}); give a tokenizer.json") from None


def tokenizer_file(name: str) -> Path:
    """Return where a tokenizer is stored."""
    path = Path(name).expanduser()
    path = path if path.is_file() else pretrained.folder(name) / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"expected a tokenizer at {path}, where there is none; set data.tokenizer")
    return path


def own_tokenizer(weights: str | None) -> str | None:
    """Return the tokenizer that comes with published weights, if one does."""
    place = pretrained.described(weights)
    path = place and place / "tokenizer.json"
    return str(path) if path and path.is_file() else None


def find_columns(name: str, features: Mapping[str, Any] | None) -> Columns | None:
    """Tell the columns of texts and labels by their type; None if the data holds no texts."""
    import datasets

    features = features or {}
    if any(isinstance(kind, datasets.Image) for kind in features.values()):
        return None
    inner = {key: kind.feature for key, kind in features.items() if hasattr(kind, "feature")}
    classes = [key for key, kind in inner.items() if isinstance(kind, datasets.ClassLabel)]
    tags = classes or [key for key in TAG_COLUMNS if _is_text(inner.get(key))]
    words = [key for key, kind in inner.items() if _is_text(kind) and key not in tags]
    if words and tags:
        return Columns((words[0],), tags[0], "tags", tuple(getattr(inner[tags[0]], "names", ())))
    texts = [key for key, kind in features.items() if _is_text(kind)]
    texts = [key for key in texts if key not in ("id", "idx", "guid", "label")]
    if not texts:
        return None
    kind = features.get("label")
    if kind is None:
        raise DataError(
            f"{name} has texts ({', '.join(texts)}) but no column 'label'; name it so, or use "
            "another data set"
        )
    target: Target = "score" if "float" in str(getattr(kind, "dtype", "")) else "class"
    names = ("false", "true") if getattr(kind, "dtype", "") == "bool" else ()
    return Columns(tuple(texts[:2]), "label", target, tuple(getattr(kind, "names", names)))


def _is_text(kind: object) -> bool:
    return getattr(kind, "dtype", "") in ("string", "large_string", "string_view")


def encode(
    name: str,
    splits: Mapping[str, Split],
    columns: Columns,
    source: Source,
    tokens: "Tokenizer",
    length: int,
) -> Dataset:
    """Read a data set of texts into memory, each cut and padded to a length in tokens.

    Of its splits, "train" is read, and the one that the source names for tests or else the first of
    ``TEST_SPLITS``.
    """
    test = next((s for s in (source.test, *TEST_SPLITS) if s in splits), None)
    if "train" not in splits or test is None:
        raise DataError(
            f"{name} needs a train split and one of {', '.join(TEST_SPLITS)}, and has "
            f"{', '.join(sorted(splits))}; use another data set"
        )
    set_length(name, tokens, length)
    names, numbers = columns.names, None
    kinds = [(splits[split].features or {}).get(columns.label) for split in ("train", test)]
    if any(_is_text(getattr(kind, "feature", kind)) for kind in kinds):  # Words, or lists of them.
        names = _words(splits["train"], columns)
        numbers = {word: number for number, word in enumerate(names)}
    (train_ids, train_labels), (test_ids, test_labels) = (
        _read(f"{name}, {split}", splits[split], columns, tokens, numbers)
        for split in ("train", test)
    )
    if columns.target == "score":
        # As images are normalised: else training would first have to find the mean.
        mean, deviation = train_labels.mean(), train_labels.std(correction=0).clamp(min=1e-6)
        train_labels, test_labels = ((s - mean) / deviation for s in (train_labels, test_labels))
    if columns.target == "class" and not names:
        names = tuple(map(str, range(int(train_labels.max()) + 1)))
    return Dataset(
        name=name,
        train_inputs=train_ids,
        train_labels=train_labels,
        test_inputs=test_ids,
        test_labels=test_labels,
        class_names=names or ("score",),
        mean=(),
        std=(),
        vocabulary=tokens.get_vocab_size(),
        target=columns.target,
        metric=source.metric or METRICS[columns.target][0],
    )


def set_length(name: str, tokens: "Tokenizer", length: int) -> None:
    """Let a tokenizer cut and pad all texts to one length; name is that of the data, for errors."""
    tokens.enable_truncation(length)
    for token in ("[PAD]", "<pad>"):  # The names of BERT and of RoBERTa for it.
        if (number := tokens.token_to_id(token)) is not None:
            tokens.enable_padding(length=length, pad_token=token, pad_id=number)
            return
    raise DataError(f"the tokenizer for {name} has no token [PAD] or <pad>; use another one")


def _words(train: Split, columns: Columns) -> tuple[str, ...]:
    """Return all labels of a training split that has words for them, in order."""
    found: set[str] = set()
    for batch in train.select_columns([columns.label]).iter(batch_size=BATCH):
        for given in batch[columns.label]:
            found.update(map(str, given if columns.target == "tags" else [given]))
    return tuple(sorted(found))


def _read(
    where: str,
    split: Split,
    columns: Columns,
    tokens: "Tokenizer",
    numbers: Mapping[str, int] | None,
) -> tuple[Tensor, Tensor]:
    """Return the token ids (N, T) of a split, and its labels (N,) or (N, T).

    Errors say `where` they are; `numbers` has the number of each label, where labels are words.
    """
    ids: list[list[int]] = []
    labels: list[Any] = []
    tagged = columns.target == "tags"
    wanted = [*columns.texts, columns.label]
    for batch in split.select_columns(wanted).iter(batch_size=BATCH):
        for column in wanted:
            if None in batch[column]:
                row = len(ids) + batch[column].index(None) + 1
                raise DataError(f"{where}: row {row} has no {column}; fill it in, or drop the row")
        texts = [batch[column] for column in columns.texts]
        inputs = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
        encoded = tokens.encode_batch(inputs, is_pretokenized=tagged)
        ids.extend(each.ids for each in encoded)
        given = batch[columns.label]
        if numbers is not None:
            rows = given if tagged else [[label] for label in given]
            rows = [[_number(where, label, numbers) for label in row] for row in rows]
            given = rows if tagged else [label for (label,) in rows]
        if tagged:
            given = [first_pieces(e.word_ids, t) for e, t in zip(encoded, given, strict=True)]
        labels.extend(given)
    kind = torch.float32 if columns.target == "score" else torch.int64
    return torch.tensor(ids), torch.tensor(labels, dtype=kind)


def _number(where: str, label: object, numbers: Mapping[str, int]) -> int:
    """Return the number of a label, which must be one of the training split's."""
    if str(label) not in numbers:
        raise DataError(
            f"{where}: no training text has the label {label!r}; they have "
            f"{', '.join(list(numbers)[:9])}: correct it, or add training texts with it"
        )
    return numbers[str(label)]


def first_pieces(words: Sequence[int | None], tags: Sequence[int]) -> list[int]:
    """Return the tag of each token: that of its word at the word's first piece, else `IGNORED`.

    Args:
        words: The number of each token's word; None for what the tokenizer added.
        tags: One for each word.
    """
    before = (None, *words)
    return [
        IGNORED if word is None or word == previous else tags[word]
        for previous, word in zip(before, words, strict=False)
    ]
