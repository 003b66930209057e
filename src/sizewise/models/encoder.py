"""Text encoders: BERT, RoBERTa, DistilBERT, MiniLM and others like them, from `transformers`.

    token ids -> embeddings -> layer -> ... -> layer -> class, score, or a tag for each token

The layers are those of the library, so its published weights fit. They are put into the shape that
methods take apart: a stem, blocks, a head, with one hidden tensor (B, T, H) between them. Where a
text is padded this tensor is zero, and every block leaves it so: that is how a block knows what to
attend to. The head is always new, as in RoBERTa: a dense layer, tanh, and a classifier.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.data import pretrained
from sizewise.data.texts import own_tokenizer, tokenizer
from sizewise.errors import ModelError
from sizewise.models.common import chain
from sizewise.surgery.anatomy import Staged


def real(hidden: Tensor) -> Tensor:
    """Return which places of a hidden tensor (B, T, H) hold a token: bool (B, T)."""
    return (hidden.detach() != 0).any(-1)


def blank(hidden: Tensor, places: Tensor) -> Tensor:
    """Return a hidden tensor (B, T, H) that is zero except at some places (B, T)."""
    return hidden.masked_fill(~places[..., None], 0.0)


class Embedding(nn.Module):
    """Turns token ids into the first hidden tensor.

    Attributes:
        embeddings: The library's module.
        pad: Id of padding.
        separator: Id of the token that ends a sentence, where sentences of a pair are told apart.
    """

    def __init__(self, embeddings: nn.Module, pad: int, separator: int | None) -> None:
        super().__init__()
        self.embeddings, self.pad, self.separator = embeddings, pad, separator

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to (B, T, H)."""
        places = ids != self.pad
        if self.separator is None:
            return blank(self.embeddings(ids), places)
        # What follows the first separator, that one not counted, is the second sentence.
        ends = (ids == self.separator).long()
        second = (ends.cumsum(1) - ends).clamp(max=1) * places
        return blank(self.embeddings(ids, token_type_ids=second), places)


class Layer(nn.Module):
    """One layer of the encoder, the library's, which attends to real tokens only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, T, H) to the same shape."""
        places = real(hidden)
        lowest = torch.finfo(hidden.dtype).min
        mask = torch.zeros_like(places, dtype=hidden.dtype).masked_fill_(~places, lowest)
        out = self.layer(hidden, mask[:, None, None, :])
        return blank(out[0] if isinstance(out, tuple) else out, places)


class Pool(nn.Module):
    """Makes one vector of a text: its first token's, or the mean of all."""

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, T, H) to (B, H)."""
        if self.pooling == "first":
            return hidden[:, 0]
        return hidden.sum(1) / real(hidden).sum(1, keepdim=True).clamp(min=1)


class Encoder(Staged):
    """Embeddings, layers, head.

    Attributes:
        layers: Where the library keeps its layers, such as "encoder.layer".
    """

    def __init__(
        self, stem: nn.Module, blocks: Iterable[nn.Module], head: nn.Module, layers: str
    ) -> None:
        super().__init__(stem, blocks, head)
        self.layers = layers

    def published(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return published weights under this module's names; others stay as they are."""
        found = {}
        for name, tensor in weights.items():
            # Behind the name of the model, as in "bert.encoder.layer.0", or without it.
            if match := re.search(rf"(?:^|\.){re.escape(self.layers)}\.(\d+)\.(.*)", name):
                name = f"blocks.{match[1]}.layer.{match[2]}"
            elif match := re.search(r"(?:^|\.)(embeddings\..*)", name):
                name = f"stem.{match[1]}"
            found[name] = tensor
        return found


def encoder(
    classes: int,
    vocabulary: int,
    tokens: int,
    tags: bool,
    sets: int = 1,
    weights: str | None = None,
    kind: str = "bert",
    layers: int = 0,
    hidden: int = 0,
    heads: int = 0,
    inner: int = 0,
    dropout: float = -1.0,
    pooling: str = "first",
) -> nn.Module:
    """Return an encoder with a head for a task.

    Args:
        classes: Outputs.
        vocabulary: How many token ids there are.
        tokens: Length of a text.
        tags: Whether every token has outputs of its own.
        sets: Label sets among which the outputs are divided.
        weights: Folder, package or hub name of published weights: its `config.json` describes the
            encoder. Default: the library's description of its kind.
        kind: The library's name for the kind of encoder, where there are no weights.
        layers: Number of layers; 0: as described.
        hidden: Size of a token's vector; 0: as described.
        heads: Heads of attention; 0: as described.
        inner: Size of the feed-forward layers; 0: as described, or four times a given `hidden`.
        dropout: Of embeddings, layers and head; below 0: as described.
        pooling: How a text becomes one vector: by its "first" token, or the "mean" of all.
    """
    if pooling not in ("first", "mean"):
        raise ModelError(f"pooling must be 'first' or 'mean', not {pooling!r}")
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError:
        raise ModelError("it needs transformers; pip install 'sizewise[text]'") from None
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner or 4 * hidden,
        "hidden_dim": inner or 4 * hidden,  # DistilBERT's name for it.
    }
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size}
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    if dropout >= 0:
        given |= dict.fromkeys(rates, dropout)
    place = pretrained.described(weights)
    if place is None:
        config = AutoConfig.for_model(kind, vocab_size=vocabulary, **given)
    else:
        config = AutoConfig.from_pretrained(place, **given)
    pad = config.pad_token_id or 0
    # RoBERTa and its kind number positions from behind the id of padding.
    room = config.max_position_embeddings - (pad + 1 if pad else 0)
    if config.vocab_size < vocabulary or room < tokens:
        raise ModelError(
            f"it knows {config.vocab_size:,} tokens and texts of {room}, and the data has "
            f"{vocabulary:,} and {tokens}; use its own tokenizer, and lower data.max_tokens"
        )
    make: Any = AutoModel.from_config
    library = make(config, attn_implementation="eager")
    known = {name for name, _ in library.named_modules()}
    path = next((p for p in ("encoder.layer", "transformer.layer") if p in known), None)
    if path is None or "embeddings" not in known:
        raise ModelError(
            f"{type(library).__name__} has no embeddings and layers where BERT has them; "
            "use a BERT, RoBERTa, DistilBERT or one of their kind"
        )
    two = getattr(config, "type_vocab_size", 1) > 1
    stem = Embedding(library.embeddings, pad, _separator(weights) if two else None)
    blocks = [Layer(layer) for layer in library.get_submodule(path)]
    rate = float(getattr(config, "hidden_dropout_prob", getattr(config, "dropout", 0.0)))
    head = _head(config.hidden_size, classes, tags, pooling, rate)
    if sets > 1:
        head.append(nn.Unflatten(-1, (sets, classes // sets)))
    return Encoder(stem, blocks, head, path)


def _head(hidden: int, classes: int, tags: bool, pooling: str, dropout: float) -> nn.Sequential:
    """Return a new head: (B, T, H) to (B, classes), or for tags to (B, T, classes)."""
    classifier = nn.Linear(hidden, classes)
    nn.init.normal_(classifier.weight, std=0.02)
    nn.init.zeros_(classifier.bias)
    if tags:
        return chain(dropout=nn.Dropout(dropout), classifier=classifier)
    dense = nn.Linear(hidden, hidden)
    nn.init.normal_(dense.weight, std=0.02)
    nn.init.zeros_(dense.bias)
    return chain(
        pool=Pool(pooling),
        dropout=nn.Dropout(dropout),
        dense=dense,
        tanh=nn.Tanh(),
        dropout2=nn.Dropout(dropout),
        classifier=classifier,
    )


@cache
def _separator(weights: str | None) -> int | None:
    """Return the id of the token that ends a sentence, from the encoder's own tokenizer."""
    stored = own_tokenizer(weights)
    found: int | None = tokenizer(stored).token_to_id("[SEP]") if stored else None
    return found
