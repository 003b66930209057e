from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sizewise.errors import ConfigError, ModelError
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.small import Small
from sizewise.pretrained import fitting, load
from sizewise.task import Task

Tasks = Callable[..., Task]


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    weights = {"a": torch.arange(3.0), "b.c": torch.ones(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path):
        found = load(path)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_what_is_no_state_dict_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("hello")
    torch.save({"a": torch.ones(1)}, tmp_path / "pickled.pt")
    with pytest.raises(ConfigError, match="there is no file"):
        load(tmp_path / "missing.safetensors")
    for name in ("text.safetensors", "pickled.pt"):
        with pytest.raises(ConfigError, match="is no safetensors file; write one with"):
            load(tmp_path / name)


def test_only_tensors_of_the_same_name_and_shape_fit() -> None:
    model = {"a": torch.zeros(2), "head": torch.zeros(3, 2)}
    weights = {
        "a": torch.ones(2, dtype=torch.float64),
        "head": torch.ones(10, 2),
        "b": torch.ones(1),
    }
    found = fitting(weights, model, "file")
    assert found.keys() == {"a"}
    assert found["a"].dtype == torch.float32
    with pytest.raises(
        ModelError, match=r"none of the 1 tensors in 'file' .* such as 'a', got 'x'"
    ):
        fitting({"x": torch.ones(1)}, model, "file")


def given(task: Task, folder: Path) -> tuple[Task, nn.Module]:
    trained = task.build(draw=1)
    save_file(trained.state_dict(), folder / "weights.safetensors")
    return replace(
        task, model=replace(task.model, weights=str(folder / "weights.safetensors"))
    ), trained


def test_a_run_starts_from_them(make_task: Tasks, tmp_path: Path) -> None:
    task, trained = given(make_task("cnn"), tmp_path)
    state = FedAvg(task).setup()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(state.tensors[name], tensor)


def test_a_narrow_model_starts_from_the_first_channels(make_task: Tasks, tmp_path: Path) -> None:
    task, trained = given(make_task("cnn"), tmp_path)
    state = Small(task, Small.Options(width=0.5)).setup()
    for name, tensor in trained.state_dict().items():
        narrow = state.tensors[name]
        assert torch.equal(narrow, tensor[tuple(map(slice, narrow.shape))])
