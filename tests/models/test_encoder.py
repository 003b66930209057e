from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import trace
from sizewise.data import pretrained
from sizewise.errors import ModelError
from sizewise.memory import prediction
from sizewise.models import build
from sizewise.models.encoder import Encoder, Pool, real
from text_cases import TOKENS, VOCABULARY, text_task

KINDS = ("bert", "roberta", "distilbert")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 0, 0, 0]])


def made(kind: str = "bert", **options: Any) -> nn.Module:
    args = {"kind": kind, "layers": 2, "hidden": 16, "heads": 2, **options}
    data = {"classes": 3, "image": (TOKENS,), "vocabulary": VOCABULARY}
    return build("encoder", **data, args=args).eval()


def library(kind: str, path: Path) -> nn.Module:
    """Return an encoder of transformers itself, and save it as it would be published."""
    from transformers import AutoConfig, AutoModel

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    inner = {"intermediate_size": 64} if kind != "distilbert" else {"hidden_dim": 64}
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **sizes, **inner)
    torch.manual_seed(3)
    model = AutoModel.from_config(config).eval()
    named = {f"{kind}.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(named, path / "model.safetensors")
    (path / "config.json").write_text(config.to_json_string())
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_published_weights_give_the_library_s_own_hidden_states(kind: str, tmp_path: Path) -> None:
    reference = library(kind, tmp_path)
    ids = torch.where(IDS == 0, 1, IDS) if kind == "roberta" else IDS  # RoBERTa's padding is 1.
    places = ids != (1 if kind == "roberta" else 0)
    data = {"classes": 3, "image": (TOKENS,), "vocabulary": VOCABULARY}
    model = build("encoder", **data, weights=str(tmp_path)).eval()
    given = pretrained.fitting(pretrained.load(tmp_path), model, "here")
    assert not [n for n in model.state_dict() if n not in given and not n.startswith("head.")]
    model.load_state_dict(given, strict=False)
    with torch.no_grad():
        expected = reference(ids, attention_mask=places.long()).last_hidden_state
        hidden = model.stem(ids)
        for block in model.blocks:
            hidden = block(hidden)
    torch.testing.assert_close(hidden[places], expected[places], rtol=1e-4, atol=1e-5)
    assert not hidden[~places].any()
    assert torch.equal(real(hidden), places)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str) -> None:
    model, pad = made(kind), 1 if kind == "roberta" else 0
    ids = torch.where(IDS == 0, pad, IDS)
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[1:], model(ids[1:, :3]), rtol=1e-4, atol=1e-6)


def test_second_sentences_are_told_apart() -> None:
    model = made()
    model.stem.separator = 3
    seen: list[Tensor] = []
    inner = model.stem.embeddings.token_type_embeddings
    inner.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.tensor([[2, 5, 3, 6, 3, 0], [2, 5, 6, 7, 3, 0]]))
    assert seen[-1].tolist() == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]


def test_pools() -> None:
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]])
    assert Pool("first")(hidden).tolist() == [[1.0, 2.0]]
    assert Pool("mean")(hidden).tolist() == [[2.0, 3.0]]


def test_tags_are_one_for_each_token() -> None:
    task = text_task("tags")
    assert task.build()(IDS).shape == (2, TOKENS, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_model(kind: str) -> None:
    task = text_task(args={"kind": kind})
    parts = task.anatomy(task.build())
    assert (len(parts.blocks), parts.stem, parts.head) == (3, ("stem",), ("head",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_narrow_encoders_are_cut_and_run(kind: str, pooling: str) -> None:
    model = made(kind, pooling=pooling)
    ids = torch.randint(2, VOCABULARY, (2, TOKENS))
    channels = trace(model, torch.empty((2, TOKENS), dtype=torch.int64, device="meta"))
    narrow = shrinking.shrink(model, channels, selection.keep(channels, 0.5))
    assert narrow.get_parameter("head.dense.weight").shape == (8, 8)
    assert narrow.get_submodule("stem.embeddings.word_embeddings").weight.shape == (VOCABULARY, 8)
    assert narrow(ids).shape == (2, 3)
    assert narrow.blocks[0].layer is not model.blocks[0].layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["class", "tags", "score"])
def test_a_step_costs_what_is_predicted(kind: str, target: Any) -> None:
    task = text_task(target, args={"kind": kind, "dropout": 0.1})
    model = task.build()
    footprint = prediction.predict(model, task.inputs(4), task.targets(4))
    optimizer = torch.optim.SGD(model.parameters())
    inputs, targets = task.drawn(4), torch.zeros_like(task.targets(4), device="cpu")
    for _ in range(2):
        with prediction.Meter(footprint.peak) as meter:
            meter.track(model, optimizer, inputs, targets)
            prediction.training_step(model, optimizer, inputs, targets)
    assert meter.peak == footprint.peak


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ModelError, match="'encoder' is for texts"):
        build("encoder", classes=3, image=(1, 8, 8))
    with pytest.raises(ModelError, match="takes no 'vocabulary', so it is not for texts"):
        build("mlp", classes=3, image=(TOKENS,), vocabulary=VOCABULARY)
    with pytest.raises(ModelError, match=r"tokens and texts of 512, and the data has 20 and 600"):
        build("encoder", classes=3, image=(600,), vocabulary=VOCABULARY)
    with pytest.raises(ModelError, match="pooling must be 'first' or 'mean', not 'max'"):
        made(pooling="max")
    with pytest.raises(ModelError, match="has no embeddings and layers where BERT has them"):
        made("gpt2")


def test_published_names_with_and_without_the_model_s() -> None:
    model = made()
    assert isinstance(model, Encoder)
    names = {
        "bert.embeddings.LayerNorm.bias": "stem.embeddings.LayerNorm.bias",
        "embeddings.LayerNorm.bias": "stem.embeddings.LayerNorm.bias",
        "encoder.layer.11.output.dense.weight": "blocks.11.layer.output.dense.weight",
        "classifier.weight": "classifier.weight",
    }
    for name, expected in names.items():
        assert list(model.published({name: torch.ones(1)})) == [expected]
