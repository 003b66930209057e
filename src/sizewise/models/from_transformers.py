"""Models of transformers: `model.name = "transformers:BertForSequenceClassification"`.

Options of the model's own config go into `model.args`, such as `num_hidden_layers = 4`. With
`model.weights`, a folder, package or hub name, the config and the weights are those of the folder;
else the config is transformers' default for the class.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.data import pretrained
from sizewise.errors import ModelError


class Logits(nn.Module):
    """A model of transformers that takes one tensor and returns one.

    Attributes:
        model: The library's.
        pad: Id of padding, to which no token attends; None: the model is for images.
        following: Of a model that tells the next token, how many tokens there are; else 0. No token
            of such a model sees those behind it, so padding, which comes last, needs no mask.
    """

    def __init__(self, model: nn.Module, pad: int | None, following: int = 0) -> None:
        super().__init__()
        self.model, self.pad = model, pad
        self.following = following
        looks = {bool(m.is_causal) for m in model.modules() if hasattr(m, "is_causal")}
        self._both_ways = looks == {False}

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for token ids (B, T) or images (B, C, H, W)."""
        if self.pad is None:
            output = self.model(pixel_values=x, return_dict=True)
        elif self.following:
            output = self.model(input_ids=x, return_dict=True)
            # It may have room for more tokens than there are.
            return output.logits[..., : self.following]  # type: ignore[no-any-return]
        else:
            output = self.model(input_ids=x, attention_mask=self.mask(x), return_dict=True)
        logits: Tensor = output.logits
        return logits

    def mask(self, ids: Tensor) -> Tensor:
        """Return what tokens may attend to.

        It is 1 for a token and 0 for padding, (B, T); where every token sees all others, what is
        added to attention, (B, 1, 1, T). Of the former, the library would look at the numbers, to
        do without a mask in batches without padding: such steps would cost less than others.
        """
        padding = ids.eq(-1 if self.pad is None else self.pad)
        if not self._both_ways:
            return (~padding).long()
        kind = torch.get_default_dtype()
        none = torch.zeros(padding.shape, dtype=kind, device=ids.device)
        return none.masked_fill(padding, torch.finfo(kind).min)[:, None, None]

    def published(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return published weights under this module's names."""
        own = self.model.state_dict()
        prefix = f"{getattr(self.model, 'base_model_prefix', '')}."
        # A folder holds the whole model, or what is below its head.
        named = {n if n in own else prefix + n: tensor for n, tensor in weights.items()}
        return {f"model.{name}": tensor for name, tensor in named.items()}


def build(
    name: str,
    /,
    *,
    classes: int,
    image: tuple[int, ...] = (),
    vocabulary: int = 0,
    tokens: int = 0,
    tags: bool = False,
    weights: str | None = None,
    **args: Any,
) -> nn.Module:
    """Return a model of transformers that gives logits, with random weights.

    Args:
        name: Its class there, one "For...Classification" or "ForCausalLM".
        classes: Outputs.
        image: Shape of one image, (channels, height, width).
        vocabulary: How many token ids there are.
        tokens: Length of a text.
        tags: Whether every token has outputs of its own.
        weights: A folder, package or hub name whose `config.json` describes the model.
        args: Further entries of the model's config; and `attn_implementation`, "eager" or "sdpa".
    """
    try:
        import transformers
    except ImportError:
        raise ModelError("it needs transformers; pip install 'sizewise[text]'") from None
    kind: Any = getattr(transformers, name, None)
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    causal = name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    known = causal or "Classification" in name
    if getattr(kind, "config_class", None) is None or not known:
        raise ModelError(
            f"transformers has no model with a classifier called {name!r}, or one that tells the "
            "next token; name a class such as 'BertForSequenceClassification', "
            "'ViTForImageClassification' or 'LlamaForCausalLM'"
        )
    asked, here = ("input_ids", "texts") if vocabulary else ("pixel_values", "images")
    if kind.main_input_name != asked:
        raise ModelError(f"{name} takes {kind.main_input_name}, and the data has {here}")
    wanted = _class_for(vocabulary, classes, tags)
    if vocabulary and not (causal if "Causal" in wanted else name.endswith(wanted)):
        raise ModelError(f"for this data a model has to give other outputs; use its ...{wanted}")
    attention = args.pop("attn_implementation", "eager")
    given: dict[str, Any] = {**args} if causal else {"num_labels": classes, **args}
    place = pretrained.described(weights)
    if not vocabulary:
        size = image[1] if image[1] == image[2] else image[1:]
        given = {"image_size": size, "num_channels": image[0], **given}
    elif place is None:
        given = {"vocab_size": vocabulary, "pad_token_id": 0, **given}
        given |= {"bos_token_id": None, "eos_token_id": None} | args
    described = kind.config_class
    config = described(**given) if place is None else described.from_pretrained(place, **given)
    if vocabulary:
        _check_room(config, vocabulary, tokens)
        config.use_cache = False
        if config.pad_token_id is None:
            config.pad_token_id = 0
    model = kind._from_config(config, attn_implementation=attention)
    return Logits(model, config.pad_token_id if vocabulary else None, classes * causal)


def _class_for(vocabulary: int, classes: int, tags: bool) -> str:
    """Return how the names of classes end whose outputs suit some data."""
    if not tags:
        return "ForSequenceClassification"
    # Every token has an output for each token there is: it is the next one that is asked for.
    return "ForCausalLM" if classes == vocabulary else "ForTokenClassification"


def _check_room(config: Any, vocabulary: int, tokens: int) -> None:
    """Raise ModelError if texts do not fit a model."""
    room = getattr(config, "max_position_embeddings", tokens)
    if config.vocab_size < vocabulary or room < tokens:
        raise ModelError(
            f"it knows {config.vocab_size:,} tokens and texts of {room}, and the data has "
            f"{vocabulary:,} and {tokens}; use its own tokenizer, or set vocab_size and "
            "max_position_embeddings in model.args"
        )
