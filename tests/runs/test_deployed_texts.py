"""An exported encoder comes with what makes its token ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import sizewise
from sizewise.data.dataset import Dataset
from sizewise.runs import deployment
from text_cases import text_dataset, write_tokenizer

TEXTS = ["good film", "bad film", "uneven film", "good good film, film film"]
SMALL: dict[str, Any] = {
    "rounds": 1,
    "model_options": {"args": {"layers": 1, "hidden": 16, "heads": 2}},
    "fleet": {"devices": 2, "per_round": 2},
    "recipe": {"batch": 4, "lr": 0.05},
}


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_texts_in_classes_out(tmp_path: Path) -> None:
    films = tmp_path / "films"
    films.mkdir()
    rows = "".join(f'"{text}",{"good" if "good" in text else "bad"}\n' for text in TEXTS)
    for split in ("train", "test"):
        (films / f"{split}.csv").write_text(f"text,label\n{rows}")
    options = {"tokenizer": write_tokenizer(tmp_path), "max_tokens": 6, "partition": "split"}
    run = sizewise.federate("encoder", films, data_options=options, **SMALL)
    facts = run.export("phone.safetensors", size="full")
    assert facts["tokenizer"] == "phone.tokenizer.json"
    # Only with the files that were exported, as on a device.
    tokens = Tokenizer.from_file("phone.tokenizer.json")
    inputs = torch.tensor([each.ids for each in tokens.encode_batch(TEXTS)])
    assert inputs.tolist()[0] == [2, 4, 6, 3, 0, 0]
    assert inputs.shape == (4, 6)
    names = json.loads(Path("phone.json").read_text())["class_names"]
    assert names == ["bad", "good"]
    found = deployment.load(Path("phone.safetensors"))(inputs).argmax(1).tolist()
    truth = ["good" if "good" in text else "bad" for text in TEXTS]
    right = [names[number] == word for number, word in zip(found, truth, strict=True)]
    assert sum(right) / 4 == facts["accuracy"]
    card = Path("phone.md").read_text()
    assert "by the tokenizer `phone.tokenizer.json`, which cuts and pads texts |" in card
    assert 'Tokenizer.from_file("phone.tokenizer.json")' in card
    assert "encode_batch(texts)]" in card


@pytest.mark.parametrize("named", [False, True])
def test_token_ids_that_were_given_in_memory(tmp_path: Path, named: bool) -> None:
    data = text_dataset()
    options: dict[str, Any] = {}
    if named:
        options = {"tokenizer": write_tokenizer(tmp_path)}
        ids = [part % 9 for part in (data.train_inputs, data.test_inputs)]
        facts = {"class_names": data.class_names, "mean": (), "std": (), "vocabulary": 9}
        data = Dataset("own", ids[0], data.train_labels, ids[1], data.test_labels, **facts)
    run = sizewise.federate("encoder", data, data_options=options, **SMALL)
    facts = run.export("phone.safetensors", size="full")
    assert facts["tokenizer"] == ("phone.tokenizer.json" if named else None)
    assert Path("phone.tokenizer.json").exists() == named
    assert ("by a tokenizer that is not known" in Path("phone.md").read_text()) == (not named)


def test_images_have_none() -> None:
    run = sizewise.federate("linear", rounds=1, data_options={"train_limit": 100})
    assert run.export("phone.safetensors", size="full")["tokenizer"] is None
    card = Path("phone.md").read_text()
    assert "| input | float32, (batch, 1, 8, 8) |" in card
    assert "token" not in card
