"""Runs of models that came built: where they start, and how they go on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sizewise
from commands import assert_one_sentence
from commands import sizewise as command
from sizewise.data.dataset import Dataset
from sizewise.errors import CheckpointError, ConfigError
from sizewise.runs import deployment

SMALL: dict[str, Any] = {
    "rounds": 2,
    "budgets": ["9kB", "1MB"],
    "fleet": {"devices": 4, "per_round": 3},
    "recipe": {"lr": 0.05, "batch": 4},
}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build(classes: int = 3, hidden: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, hidden, 3, padding=1),
        nn.Sequential(nn.BatchNorm2d(hidden), nn.ReLU(), nn.Conv2d(hidden, hidden, 3, 1, 1)),
        nn.Sequential(nn.BatchNorm2d(hidden), nn.ReLU(), nn.Conv2d(hidden, hidden, 3, 1, 1)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(hidden, classes)),
    )


@pytest.mark.parametrize(
    "method", ["fedavg", "heterofl", "small", "fedepth", "m-fedepth", "depthfl", "nefl"]
)
def test_a_run_is_that_of_its_function_and_weights(method: str, dataset: Dataset) -> None:
    """Where it starts, and what is drawn beside that: narrow sizes, exits, heads."""
    model = build()
    save_file(model.state_dict(), "weights.safetensors")
    stored = {"weights": "weights.safetensors"}
    built = sizewise.federate(model, dataset, method=method, **SMALL)
    loaded = sizewise.federate(build, dataset, method=method, model_options=stored, **SMALL)
    drawn = sizewise.federate(build, dataset, method=method, **SMALL)
    hashes = [run.result["state_sha256"] for run in (built, loaded, drawn)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("method", ["splitmix", "fedgkt", "fedin"])
def test_methods_of_several_models_refuse_it(method: str, dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a built model as a class or function"):
        sizewise.federate(build(), dataset, method=method, **SMALL)
    assert not list(tmp_path.iterdir())


def stopped(model: object, dataset: Dataset, after: int = 1) -> None:
    def stop(line: Any, totals: Any) -> None:
        if line["round"] == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sizewise.federate(model, dataset, out="run", callbacks=[stop], **SMALL)


def test_it_goes_on_with_a_model_of_the_same_structure(dataset: Dataset) -> None:
    """Its weights are in the checkpoint: nobody draws the same twice in another notebook."""
    model = build()
    whole = sizewise.federate(model, dataset, **SMALL)
    stopped(model, dataset)
    before = sorted(path.name for path in Path("run").iterdir())
    with pytest.raises(CheckpointError, match=r"the model is not what this run was started with"):
        sizewise.resume("run", build(hidden=7), dataset)
    assert sorted(path.name for path in Path("run").iterdir()) == before
    run = sizewise.resume("run", build(), dataset)
    assert run.result["state_sha256"] == whole.result["state_sha256"]
    says = "the model 'Sequential' was given in memory; give it again, from Python"
    with pytest.raises(ConfigError, match=says):
        sizewise.resume("run", data=dataset)


def test_a_hash_of_another_version_of_torch_can_be_deleted(dataset: Dataset) -> None:
    run, path = sizewise.federate(build, dataset, out="run", **SMALL), Path("run/config.toml")
    lines = path.read_text().splitlines()
    hashes = [n for n, line in enumerate(lines) if line.startswith("sha256 = ")]
    model = next(n for n in hashes if n < lines.index("[data]"))
    path.write_text("\n".join([*lines[:model], 'sha256 = "other"', *lines[model + 1 :]]))
    with pytest.raises(CheckpointError, match="if only the version of torch is another, delete"):
        run.model()
    path.write_text("\n".join([*lines[:model], *lines[model + 1 :]]))
    assert run.model()(torch.rand(2, 1, 4, 4)).shape == (2, 3)
    assert sizewise.resume("run", build, dataset).result == run.result


def test_before_the_first_round_is_done_the_weights_must_be_the_same(dataset: Dataset) -> None:
    model = build()
    stopped(model, dataset)
    for path in Path("run/checkpoints").glob("round-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no round of 'run' is done yet, and the model has"):
        sizewise.resume("run", build(), dataset)
    whole = sizewise.federate(model, dataset, **SMALL).result["state_sha256"]
    assert sizewise.resume("run", model, dataset).result["state_sha256"] == whole


def test_the_command_line_says_that_it_needs_the_model() -> None:
    limits = {"train_limit": 60, "test_limit": 20}
    sizewise.federate(build(10), out="run", data_options=limits, **SMALL)
    for arguments in (("export", "run", "--size", "full"), ("resume", "run")):
        assert_one_sentence(command(*arguments), "the model 'Sequential' was given in memory")


def test_an_export_is_loaded_again(dataset: Dataset) -> None:
    run = sizewise.federate(build(), dataset, method="heterofl", **SMALL)
    small = next(iter(run.result["sizes"]))
    run.export("small.safetensors", size=small)
    found, module = deployment.load("small.safetensors", build()), run.model(small)
    inputs = torch.rand(2, 1, 4, 4)
    assert torch.equal(found(inputs), module(inputs))
    assert not module.training
    assert module(inputs).shape == (2, 3)
    assert sum(p.numel() for p in module.parameters()) < sum(
        p.numel() for p in build().parameters()
    )
    with pytest.raises(ConfigError, match="the model 'Sequential' was given in memory"):
        deployment.load("small.safetensors")
    with pytest.raises(CheckpointError, match="the model is not what this run was started with"):
        deployment.load("small.safetensors", build(hidden=6))
    with pytest.raises(ConfigError, match="the run has no size 'tiny'"):
        run.model("tiny")
    assert run.model().get_parameter("0.weight").shape == (8, 1, 3, 3)
