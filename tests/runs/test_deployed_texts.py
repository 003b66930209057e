"""An exported encoder comes with what makes its token ids."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from tokenizers import Tokenizer

import sizewise
from sizewise.data import memory, sources
from sizewise.data.dataset import Dataset
from sizewise.errors import CheckpointError
from sizewise.runs import deployment, session
from text_cases import text_dataset, write_tokenizer

TRUTH = ["good", "bad", "bad", "good"]
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


FORMS: dict[str, Callable[[], Any]] = {
    "frame": lambda: pandas.DataFrame({"text": TEXTS * 5, "label": TRUTH * 5}),
    "Hugging Face": lambda: datasets.Dataset.from_dict({"text": TEXTS * 5, "label": TRUTH * 5}),
    "lists": lambda: (TEXTS * 5, TRUTH * 5),
    "arrays": lambda: (np.array(TEXTS * 5), np.array(TRUTH * 5)),
    "samples": lambda: list(zip(TEXTS * 5, TRUTH * 5, strict=True)),
    "one set per device": lambda: [(TEXTS * 2, TRUTH * 2), (TEXTS * 3, TRUTH * 3)],
}


@pytest.mark.parametrize("form", FORMS)
def test_texts_in_memory_are_those_in_files(form: str, tmp_path: Path) -> None:
    options = {"tokenizer": write_tokenizer(tmp_path), "max_tokens": 6}
    found = memory.understood(FORMS[form](), options)
    assert isinstance(found, Dataset)
    assert found.tokenizer == Path(options["tokenizer"]).read_text()
    FORMS["frame"]().to_csv("films.csv", index=False)
    FORMS["frame"]().to_json("films.jsonl", orient="records", lines=True)
    for name in ("films.csv", "films.jsonl"):
        stored = replace(sources.load(name, **options), groups=found.groups)
        assert form == "one set per device" or memory.identity(stored) == memory.identity(found)


def test_the_tokenizer_is_part_of_the_run(tmp_path: Path) -> None:
    place = Path(write_tokenizer(tmp_path))
    options = {"tokenizer": str(place), "max_tokens": 6}
    FORMS["frame"]().to_csv("films.csv", index=False)
    run = sizewise.federate("encoder", Path("films.csv"), data_options=options, **SMALL)
    kept = run.folder / "tokenizer.json"
    assert kept.read_bytes() == place.read_bytes()
    described = json.loads((run.folder / "partition.json").read_text())
    assert described["tokenizer_sha256"] == hashlib.sha256(kept.read_bytes()).hexdigest()
    before = run.export("phone.safetensors", size="full")
    # Another one may make the same ids of these texts, and still not of others.
    other = json.loads(place.read_text())
    other["model"]["vocab"] |= {"more": 9, "words": 10}
    Path("other.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=r"tokenizer is not what .* was started with; give "):
        session.resumed(run.folder, overrides=["data.tokenizer=other.json"]).__enter__()
    assert "other.json" not in (run.folder / "config.toml").read_text()
    place.write_bytes(Path("other.json").read_bytes())
    with pytest.raises(CheckpointError, match="tokenizer is not what"):
        deployment.export(run.folder, Path("other.safetensors"), size="full")
    assert not Path("other.safetensors").exists()
    # The one in the folder will do, wherever it came from.
    changed = [f"data.tokenizer={kept}", "rounds=2"]
    with session.resumed(run.folder, overrides=changed) as federation:
        assert len(federation.run()["sizes"]) == 1
    assert run.export("phone.safetensors", size="full")["file_bytes"] == before["file_bytes"]


def test_images_have_none() -> None:
    run = sizewise.federate("linear", rounds=1, data_options={"train_limit": 100})
    assert run.export("phone.safetensors", size="full")["tokenizer"] is None
    card = Path("phone.md").read_text()
    assert "| input | float32, (batch, 1, 8, 8) |" in card
    assert "token" not in card
