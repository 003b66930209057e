"""Texts as token ids, all of one length.

Three kinds are understood: one or two columns of text with a class or a score, as in GLUE; lists of
words with a tag for each, as in named entity recognition; and a column of texts alone, whose next
tokens are learned. All texts are cut and padded to one length, because what a training step costs
must not depend on the data.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sizewise.data import labels, pretrained
from sizewise.data.columns import Columns
from sizewise.data.dataset import Dataset
from sizewise.data.labels import Labels
from sizewise.data.samples import Samples
from sizewise.data.tables import Batch, Values
from sizewise.errors import DataError
from sizewise.steps.step import IGNORED

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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


def tokenizer_text(name: str) -> str:
    """Return a tokenizer as it is stored, which is JSON."""
    return tokenizer_file(name).read_text(encoding="utf-8")


def own_tokenizer(weights: str | None) -> str | None:
    """Return the tokenizer that comes with published weights, if one does."""
    place = pretrained.described(weights)
    path = place and place / "tokenizer.json"
    return str(path) if path and path.is_file() else None


def set_length(name: str, tokens: "Tokenizer", length: int) -> None:
    """Let a tokenizer cut and pad all texts to one length; name is that of the data, for errors."""
    tokens.enable_truncation(length)
    for token in ("[PAD]", "<pad>"):  # The names of BERT and of RoBERTa for it.
        if (number := tokens.token_to_id(token)) is not None:
            tokens.enable_padding(length=length, pad_token=token, pad_id=number)
            return
    raise DataError(f"the tokenizer for {name} has no token [PAD] or <pad>; use another one")


def tokenizer_of(data: Dataset, name: str | None) -> str:
    """Return what makes token ids of texts for a data set, as JSON; nothing for other data.

    Of token ids that were given in memory it is the tokenizer of this name, if it has as many.
    """
    if data.tokenizer or not data.vocabulary or name is None:
        return data.tokenizer
    fits = tokenizer(name).get_vocab_size() == data.vocabulary
    return tokenizer_text(name) if fits else ""


def of_length(stored: str, length: int) -> str:
    """Return a tokenizer, as JSON, that cuts and pads all texts to one length."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_str(stored)
    set_length("the model", tokens, length)
    return tokens.to_str(pretty=True)


class TextReader:
    """Makes token ids, and labels that suit them, of the rows of a table."""

    def __init__(self, where: str, columns: Columns, name: str, length: int) -> None:
        self._where, self._columns = where, columns
        self._name, self._tokens = name, tokenizer(name)
        set_length(where, self._tokens, length)
        self._pad = int((self._tokens.padding or {})["pad_id"])
        self._tags = {name: number for number, name in enumerate(columns.names)}

    def read(self, batch: Batch, first: int) -> tuple[list[Tensor], Values]:
        """Return the token ids (B, T) of a batch whose first row is of that number; its labels."""
        columns = self._columns
        for column in columns.inputs:
            for row, cell in enumerate(batch[column], first + 1):
                if not isinstance(cell, str | list | tuple):
                    raise DataError(
                        f"{self._where}: row {row} has no {column}; fill it in, or drop the row"
                    )
        parts = [list(batch[column]) for column in columns.inputs]
        rows = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
        tagged = columns.target == "tags"
        encoded = self._tokens.encode_batch(rows, is_pretokenized=tagged)
        ids = torch.tensor([each.ids for each in encoded])
        if columns.target == "next":
            return [ids], list(next_tokens(ids, self._pad))
        if not tagged:
            return [ids], batch[columns.label]
        numbers = [self._numbers(row) for row in batch[columns.label]]
        pairs = zip(encoded, numbers, strict=True)
        return [ids], [first_pieces(each.word_ids, tags) for each, tags in pairs]

    def labels(self, given: Sequence[Any]) -> Labels:
        """Return all labels of the table as numbers."""
        if self._columns.target == "score":
            return labels.scores(self._where, given)
        if self._columns.target == "class":
            return labels.classes(self._where, given, self._columns.names)
        if self._columns.target == "next":
            return Labels(torch.stack(list(given)), target="next")
        found = Labels(torch.tensor(given), tuple(self._tags), "tags")
        if self._columns.names:
            return found
        return found.numbered_as(labels.in_order(self._tags), self._where)

    def described(self, samples: Samples) -> Samples:
        """Return the samples with the tokenizer that made them."""
        vocabulary, stored = self._tokens.get_vocab_size(), tokenizer_text(self._name)
        return replace(samples, vocabulary=vocabulary, tokenizer=stored)

    def _numbers(self, tags: Sequence[Any]) -> list[int]:
        """Return the numbers of tags; words get one when they come for the first time."""
        if self._columns.names:
            return list(tags)
        return [self._tags.setdefault(str(tag), len(self._tags)) for tag in tags]


def next_tokens(ids: Tensor, pad: int) -> Tensor:
    """Return for each token the one that follows, `IGNORED` at the end of a text and behind it.

    Args:
        ids: Token ids, int64 (N, T).
        pad: That of padding.
    """
    following = ids.roll(-1, 1)
    following[:, -1] = pad
    return following.where(following != pad, IGNORED)


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
