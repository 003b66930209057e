"""Trackers get every round; without their packages, a sentence says so."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from commands import assert_one_sentence, sizewise
from sizewise import config as configs
from sizewise.errors import ConfigError
from sizewise.runs import session, trackers

TABLES = {
    "rounds": 2,
    "model": {"name": "linear"},
    "data": {"train_limit": 200, "test_limit": 50},
    "fleet": {"devices": 4, "per_round": 2, "budgets": ["1MB"], "profiles": ["pi-4"]},
}


def track(name: str, folder: Path) -> dict[str, Any]:
    with (
        session.started(configs.from_dict(TABLES), folder) as federation,
        trackers.opened(trackers.checked([name]), federation.config, folder) as observe,
    ):
        return federation.run(observe)


class Recorder(ModuleType):
    """Stands in for a tracker's package: notes every call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> "Recorder":
            self.calls.append((name, arguments, keywords))
            return self

        return call

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append(("exit", (), {}))

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, keywords) for n, arguments, keywords in self.calls if n == name]


def test_weights_and_biases_stay_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    result = track("wandb", tmp_path / "run")
    ((_, settings),) = recorder.named("init")
    assert settings["mode"] == "offline"
    assert settings["dir"] == str(tmp_path / "run")
    assert settings["config"]["model"]["name"] == "linear"
    first, second = recorder.named("log")
    assert (first[1]["step"], second[1]["step"]) == (1, 2)
    (figures,) = second[0]
    assert figures["accuracy"] == result["accuracy"]
    assert figures["bytes_up"] == result["bytes_up"]
    assert figures["peak_bytes/1MB"] == result["peak_bytes"]["1MB"]
    assert figures["sizes/full"] == result["accuracy"]
    assert figures["device_seconds"] > 0
    assert len(recorder.named("finish")) == 1


def test_mlflow_writes_into_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", recorder)
    result = track("mlflow", tmp_path / "run")
    (((place,), _),) = recorder.named("set_tracking_uri")
    assert str(tmp_path / "run") in place
    (((parameters,), _),) = recorder.named("log_params")
    assert parameters["fleet.devices"] == "4"
    _, ((figures,), last) = recorder.named("log_metrics")
    assert last == {"step": 2}
    assert figures["accuracy"] == result["accuracy"]
    assert len(recorder.named("exit")) == 1


def test_tensorboard_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard, a part of [dev], is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = track("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    accuracy = events.Scalars("accuracy")
    assert [event.step for event in accuracy] == [1, 2]
    assert accuracy[-1].value == pytest.approx(result["accuracy"])


def test_what_is_not_installed_or_not_known_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        trackers.checked(["wandb"])
    answer = sizewise("run", "--track", "wandb", "--out", tmp_path / "run")
    assert_one_sentence(answer, "--track wandb needs a package that is not installed")
    assert not (tmp_path / "run").exists()
    answer = sizewise("run", "--track", "tensorbord", "--out", tmp_path / "other")
    assert_one_sentence(answer, "there is no tracker 'tensorbord'; did you mean 'tensorboard'?")
    assert not (tmp_path / "other").exists()


def test_figures_of_devices_are_tracked(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    tables = {**TABLES, "data": {**TABLES["data"], "validation": 0.2}}  # type: ignore[dict-item]
    with session.started(configs.from_dict(tables), tmp_path / "run") as federation:
        result = federation.run(lambda line, so_far: seen.append(trackers.figures(line, so_far)))
    assert len(seen) == 2
    for name in trackers.VALIDATION:
        assert seen[-1][f"validation/{name}"] == result["validation"][name]
