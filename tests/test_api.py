"""The short way from Python."""

from pathlib import Path

import pytest
from torch import nn

import sizewise
from sizewise import deployment
from sizewise.data.dataset import Dataset
from sizewise.errors import CheckpointError, ConfigError


def build(classes: int, image: tuple[int, int, int]) -> nn.Module:
    height, width = image[1:]
    return nn.Sequential(nn.Flatten(), nn.Linear(image[0] * height * width, classes))


def test_a_function_and_data_in_memory(dataset: Dataset, tmp_path: Path) -> None:
    rounds = []
    run = sizewise.federate(
        build,
        dataset,
        budgets=["1MB"],
        rounds=2,
        out=tmp_path / "run",
        observe=lambda line, totals: rounds.append(line["round"]),
        fleet={"devices": 3, "per_round": 2},
        recipe={"lr": 0.05, "batch": 4},
        seed=4,
    )
    assert rounds == [1, 2]
    assert run.folder == tmp_path / "run"
    assert run.accuracy == run.result["accuracy"] > 0
    assert "seed = 4" in (run.folder / "config.toml").read_text()
    page = run.report(tmp_path / "report.html").read_text()
    assert "reaches" in page
    assert run.export(tmp_path / "model.safetensors", size="full")["accuracy"] == run.accuracy
    with pytest.raises(CheckpointError, match="the data is not what"):
        deployment.export(run.folder, tmp_path / "model.safetensors", size="full")


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


def test_a_nameless_model_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="at the top of a module"):
        sizewise.federate(lambda classes: nn.Linear(1, classes))
