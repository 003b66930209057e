"""The short way from Python."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn

import sizewise
from commands import assert_one_sentence
from commands import sizewise as command
from sizewise.data.dataset import Dataset
from sizewise.errors import ConfigError, DataError
from sizewise.runs import deployment

IMAGES = torch.zeros(6, 1, 4, 4, dtype=torch.uint8)
LABELS = torch.arange(6) % 3
SMALL: dict[str, Any] = {
    "rounds": 2,
    "fleet": {"devices": 3, "per_round": 2},
    "recipe": {"lr": 0.05, "batch": 4},
}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build(classes: int, image: tuple[int, int, int]) -> nn.Module:
    height, width = image[1:]
    return nn.Sequential(nn.Flatten(), nn.Linear(image[0] * height * width, classes))


def test_a_function_and_data_in_memory(dataset: Dataset, tmp_path: Path) -> None:
    rounds = []
    run = sizewise.federate(
        build,
        dataset,
        budgets=["1MB"],
        out=tmp_path / "run",
        observe=lambda line, totals: rounds.append(line["round"]),
        seed=4,
        **SMALL,
    )
    assert rounds == [1, 2]
    assert run.folder == tmp_path / "run"
    assert run.accuracy == run.result["accuracy"] > 0
    assert "seed = 4" in (run.folder / "config.toml").read_text()
    page = run.report(tmp_path / "report.html").read_text()
    assert "<title>fedavg reaches" in page
    assert "on tiny</title>" in page
    assert run.export(tmp_path / "model.safetensors", size="full")["accuracy"] == run.accuracy
    for arguments in (("export", run.folder, "--size", "full"), ("resume", run.folder)):
        assert_one_sentence(command(*arguments), "the data of this run, 'tiny', was given in mem")


def test_names_only_and_an_export(tmp_path: Path) -> None:
    run = sizewise.federate(
        "linear",
        rounds=1,
        out=tmp_path / "run",
        data_options={"train_limit": 200, "test_limit": 50},
        method="heterofl",
        method_options={"widths": [1.0]},
    )
    facts = run.export(tmp_path / "model.safetensors", memory="1MB")
    assert facts["size"] == "full"
    assert (tmp_path / "model.md").exists()


@pytest.mark.parametrize("as_array", [False, True])
def test_a_tuple_of_tensors(dataset: Dataset, as_array: bool) -> None:
    parts = [dataset.train_inputs, dataset.train_labels, dataset.test_inputs, dataset.test_labels]
    given = tuple(part.numpy().astype(np.uint8) if as_array else part for part in parts)
    run = sizewise.federate("linear", given, **SMALL)
    assert run.dataset is not None
    assert torch.equal(run.dataset.train_inputs, dataset.train_inputs)
    assert run.dataset.class_names == ("0", "1", "2")
    assert "-tensors" in run.folder.name
    # Normalised by what is in it, not by what somebody else measured.
    seen = run.dataset.transform()(run.dataset.train_inputs, None)
    assert float(seen.mean()) == pytest.approx(0, abs=1e-5)


def test_a_path_is_a_folder_and_never_a_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"at {tmp_path / 'digits'}, where there is no such thing"):
        sizewise.federate("linear", Path("digits"))
    pixels = {"img": [np.full((4, 4), 80 * label, dtype=np.uint8) for label in range(3)] * 4}
    kinds = {"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    rows = datasets.Dataset.from_dict(
        {**pixels, "label": [0, 1, 2] * 4}, features=datasets.Features(kinds)
    )
    Path("digits").mkdir()
    for split in ("train", "test"):
        rows.to_parquet(Path("digits", f"{split}.parquet"))
    run = sizewise.federate("linear", Path("digits"), **SMALL)
    recorded = tomllib.loads((run.folder / "config.toml").read_text())["data"]
    assert recorded["name"] == str(tmp_path / "digits")
    assert "sha256" not in recorded


@pytest.mark.parametrize(
    ("given", "came"),
    [
        (None, "NoneType"),
        (set, "type"),
        ((), "tuple"),
        (7, "int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_data_is_one_sentence(given: Any, came: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"or a sizewise Dataset; {came} came: ") as caught:
        sizewise.federate("linear", given)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((IMAGES.float(), LABELS, IMAGES, LABELS), "are torch.float32, test inputs torch.uint8"),
        ((IMAGES[0, 0], LABELS, IMAGES, LABELS), r"the data has 4 inputs and 6 labels"),
        ((IMAGES, LABELS / 2, IMAGES, LABELS), "labels are classes, and 0.5 is none"),
        ((IMAGES, LABELS, IMAGES, LABELS[1:]), "the data has 6 inputs and 5 labels"),
        ((IMAGES, LABELS * 0, IMAGES, LABELS), "test labels must lie in 0..0, got 0..2"),
    ],
)
def test_tensors_that_do_not_fit(parts: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        sizewise.federate("linear", parts)
    assert not list(tmp_path.iterdir())


def test_what_says_how_files_are_read_is_not_for_data_in_memory(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_limit is 3, and the Dataset in memory"):
        sizewise.federate("linear", dataset, data_options={"train_limit": 3})


@pytest.mark.parametrize(("model", "came"), [(None, "NoneType"), (3, "int")])
def test_other_models_are_one_sentence(model: Any, came: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"a function or class .*; a {came} came: ") as caught:
        sizewise.federate(model)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def same_everywhere(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))


def test_functions_classes_and_closures_are_alike(dataset: Dataset) -> None:
    class Inner(nn.Sequential):
        def __init__(self, classes: int) -> None:
            super().__init__(nn.Flatten(), nn.Linear(16, classes))

    given = [build, same_everywhere, lambda classes: same_everywhere(classes), Inner]
    given.append(partial(build, image=(1, 4, 4)))
    hashes = {sizewise.federate(m, dataset, **SMALL).result["state_sha256"] for m in given}
    assert len(hashes) == 1


def test_workers_cannot_import_what_is_in_memory(dataset: Dataset, tmp_path: Path) -> None:
    for model in (lambda classes: same_everywhere(classes), same_everywhere(3)):
        with pytest.raises(
            ConfigError, match=r"worker processes cannot import .* set engine\.workers to 1"
        ):
            sizewise.federate(model, dataset, engine={"workers": 2})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budgets", ["1MB", 1_000_000, 1e6, ["1MB"], ("1MB",)])
def test_one_budget_is_that_of_all_devices(budgets: Any, dataset: Dataset) -> None:
    run = sizewise.federate("linear", dataset, budgets=budgets, **SMALL)
    assert list(run.result["budget_bytes"].values()) == [1_000_000]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"budgets": "twenty"}, "positive amount of memory .* not 'twenty'"),
        ({"budgets": {"20MB": 3}}, "budgets are a list"),
        ({"budgets": "1MB", "fleet": {"budgets": ["2MB"]}}, "budgets are given twice"),
        ({"fleets": {}}, "federate takes no 'fleets'; did you mean 'fleet'"),
        ({"modle_options": {}}, "did you mean 'model_options'"),
        ({"model_options": {"name": "mlp"}}, "model_options is a dict of the keys beside model"),
        ({"data_options": {"name": "mnist"}}, "data_options is a dict of the keys beside data"),
        ({"method_options": 3}, "method_options is a dict"),
        ({"data_options": {"alfa": 1}}, r"unknown key 'data\.alfa'"),
        ({"fleet": None}, "fleet must be a table"),
    ],
)
def test_what_cannot_be_used(tables: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        sizewise.federate("linear", **tables)
    assert not list(tmp_path.iterdir())


def test_a_data_set_keeps_its_own_name(dataset: Dataset, tmp_path: Path) -> None:
    run = sizewise.federate("linear", replace(dataset, name="a/b"), **SMALL)
    assert run.folder.parent == Path("runs")
    assert "on a/b</title>" in run.report(tmp_path / "report.html").read_text()


def test_a_function_of_the_same_name_does_not_get_in_the_way(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the cells of a notebook are run again."""
    run = sizewise.federate(build, dataset, **SMALL)
    before = run.export("model.safetensors", size="full")

    def other(classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, classes))

    monkeypatch.setattr(sys.modules[__name__], "build", other)
    assert run.export("model.safetensors", size="full") == before


SCRIPT = """
import sys
import sizewise
from sizewise import deployment
from torch import nn

def build(classes, image):
    return nn.Sequential(nn.Flatten(), nn.Linear(image[0] * image[1] * image[2], classes))

if __name__ == "__main__":
    def stop(line, totals):
        if line["round"] == 1 and "stop" in sys.argv:
            raise KeyboardInterrupt
    options = {"train_limit": 100, "test_limit": 20}
    run = sizewise.federate(build, rounds=2, out="run", data_options=options, observe=stop)
    run.export("own.safetensors", size="full")
    deployment.export(run.folder, run.folder / "model.safetensors", size="full")
"""


def test_a_model_of_a_script() -> None:
    Path("script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "script.py"], check=True)
    assert Path("own.safetensors").is_file()
    says = "the model '__main__:build' belongs to the script or notebook that defines it"
    assert_one_sentence(command("export", "run", "--size", "full"), says)
    assert_one_sentence(command("run", "run/config.toml", "--out", "again"), says)
    assert not Path("again").exists()
    with pytest.raises(ConfigError, match=says):
        deployment.load("own.safetensors")
    assert deployment.load("own.safetensors", build)
    Path("run").rename("finished")
    stopped = subprocess.run(
        [sys.executable, "script.py", "stop"], capture_output=True, check=False
    )
    assert stopped.returncode != 0
    assert_one_sentence(command("resume", "run"), says)
