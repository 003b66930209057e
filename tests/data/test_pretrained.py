from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import trace
from sizewise.data.pretrained import fitting, load
from sizewise.errors import ConfigError, ModelError
from sizewise.methods import small
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.splitmix import SplitMix
from sizewise.training.task import Task

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


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight


def test_only_tensors_of_the_same_name_and_shape_fit() -> None:
    weights = {"b.weight": torch.ones(2, 2, dtype=torch.float64), "head.weight": torch.ones(9, 2)}
    found = fitting(weights, Small(), "file")
    assert found.keys() == {"a.weight", "b.weight"}  # Under all names of a tied tensor.
    assert found["a.weight"].dtype == torch.float32
    with pytest.raises(ModelError, match=r"none of the 1 tensors in 'file' .* 'a.weight', got 'x'"):
        fitting({"x": torch.ones(1)}, Small(), "file")


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
    state = small.Small(task, small.Small.Options(width=0.5)).setup()
    for name, tensor in trained.state_dict().items():
        narrow = state.tensors[name]
        assert torch.equal(narrow, tensor[tuple(map(slice, narrow.shape))])


@pytest.mark.parametrize("model", [("vit", {"dim": 8, "heads": 2, "depth": 1}), ("densenet10", {})])
def test_heads_and_concatenations_keep_their_own_entries(
    make_task: Tasks, tmp_path: Path, model: tuple[str, dict[str, int]]
) -> None:
    task, trained = given(make_task(*model), tmp_path)
    state = small.Small(task, small.Small.Options(width=0.5)).setup()
    channels = trace(trained, torch.empty((2, *task.input_shape), device="meta"))
    expected = shrinking.shrink(trained, channels, selection.keep_like(channels, state.tensors))
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state.tensors[name], tensor)


def test_splitmix_refuses_them(make_task: Tasks, tmp_path: Path) -> None:
    task, _ = given(make_task("cnn"), tmp_path)
    with pytest.raises(ConfigError, match=r"cannot all start from model\.weights"):
        SplitMix(task)
