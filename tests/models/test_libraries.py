"""Models of timm, torchvision and transformers by name; the first two as they are called."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sizewise.data import pretrained
from sizewise.errors import ModelError
from sizewise.models import build, takes_width

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
BERT = "transformers:BertForSequenceClassification"
VIT = "transformers:ViTForImageClassification"


def texts(name: str, args: dict[str, Any], **given: Any) -> Any:
    return build(name, classes=3, image=(6,), vocabulary=20, args=args, **given)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the stubs of timm and torchvision are called with."""
    seen: list[dict[str, Any]] = []

    def create_model(name: str, **given: Any) -> nn.Module:
        seen.append({"name": name, **given})
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(given["num_classes"]))

    def settings(name: str) -> Any:
        return types.SimpleNamespace(fixed_input_size=name == "vit")

    timm: Any = types.ModuleType("timm")
    timm.create_model, timm.get_pretrained_cfg = create_model, settings
    timm.is_model = lambda name: name in ("vit", "resnet26")
    timm.list_models = lambda pattern: ["resnet26"] if "resne" in pattern else []
    vision: Any = types.ModuleType("torchvision.models")
    vision.resnet18 = lambda **given: create_model("resnet18", **given)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", vision)
    return seen


def test_timm_is_told_of_classes_channels_and_a_fixed_size(calls: list[dict[str, Any]]) -> None:
    image = (1, 8, 8)
    build("timm:resnet26", classes=3, image=image, args={"drop_rate": 0.1}, check=False)
    build("timm:vit", classes=4, image=image, args={"depth": 2}, check=False)
    build("timm:vit", classes=4, image=image, args={"img_size": 16}, check=False)
    common = {"pretrained": False, "in_chans": 1}
    assert calls == [
        {"name": "resnet26", "num_classes": 3, "drop_rate": 0.1, **common},
        {"name": "vit", "num_classes": 4, "img_size": (8, 8), "depth": 2, **common},
        {"name": "vit", "num_classes": 4, "img_size": 16, **common},
    ]
    with pytest.raises(ModelError, match="timm has no model 'resnet27'; it has resnet26"):
        build("timm:resnet27", classes=3, image=image)


def test_torchvision_is_told_of_classes(calls: list[dict[str, Any]]) -> None:
    name = "torchvision.models:resnet18"
    build(name, classes=3, image=(3, 8, 8), args={"zero_init_residual": True}, check=False)
    assert calls == [{"name": "resnet18", "num_classes": 3, "zero_init_residual": True}]
    with pytest.raises(ModelError, match=r"torchvision\.models has no model 'resnet19'"):
        build("torchvision.models:resnet19", classes=3, image=(3, 8, 8))


@pytest.mark.parametrize("name", ["timm:vit", "torchvision.models:resnet18", BERT])
def test_a_library_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = name.partition(":")[0].partition(".")[0]
    for module in (library, f"{library}.models"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelError, match=f"it needs {library}; pip install"):
        texts(name, {}) if name == BERT else build(name, classes=3, image=(3, 8, 8))


def test_images_and_texts() -> None:
    model = build(VIT, classes=3, image=(1, 8, 8), args={**SMALL, "patch_size": 4})
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert not takes_width(VIT)
    tagged = build(
        "transformers:BertForTokenClassification",
        **{"classes": 3, "image": (6,), "vocabulary": 20, "tags": True, "args": SMALL},
    )
    assert tagged(torch.randint(20, (2, 6))).shape == (2, 6, 3)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        (BERT, SMALL),
        ("transformers:GPT2ForSequenceClassification", {"n_embd": 8, "n_layer": 1, "n_head": 2}),
    ],
)
def test_padding_is_not_seen(name: str, args: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = texts(name, args).eval()
    ids = torch.randint(1, 20, (4, 6))
    ids[0, 3:] = 0
    ids[1, 5:] = 0
    with torch.no_grad():
        logits = model(ids)
        mask = (ids != 0).long()
        assert torch.equal(logits, model.model(input_ids=ids, attention_mask=mask).logits)
        short = model(ids[:1, :3])
    torch.testing.assert_close(logits[:1], short)


def test_published_weights_get_their_names(tmp_path: Path) -> None:
    donor = texts(BERT, SMALL)
    whole = {name: tensor.clone() for name, tensor in donor.model.state_dict().items()}
    bare = {n.removeprefix("bert."): t for n, t in whole.items() if n.startswith("bert.")}
    donor.model.config.save_pretrained(tmp_path)
    torch.manual_seed(1)
    for stored, missing in ((whole, set()), (bare, {"model.classifier.weight"})):
        save_file(stored, tmp_path / "model.safetensors")
        model = texts(BERT, {}, weights=str(tmp_path))
        given = pretrained.fitting(pretrained.load(tmp_path), model, "here")
        assert missing <= model.state_dict().keys() - given.keys()
        assert all(torch.equal(given[f"model.{n}"], whole[n]) for n in whole if n in stored)
        assert "model.bert.encoder.layer.1.output.dense.weight" in given


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("transformers:BertModel", {}, "has no model with a classifier called 'BertModel'"),
        ("transformers:Bort", {}, "has no model with a classifier called 'Bort'"),
        (VIT, SMALL, "ViTForImageClassification takes pixel_values, and the data has texts"),
        ("transformers:BertForTokenClassification", SMALL, "use its ...ForSequenceClassification"),
        (BERT, {**SMALL, "max_position_embeddings": 4}, "texts of 4, and the data has 20 and 6"),
        (BERT, {**SMALL, "num_labels": 7}, "gives 7 outputs for 3 classes"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        texts(name, args)
