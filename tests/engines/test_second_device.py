"""Everything trains on another device than the CPU, with the CPU's bits, and leaves nothing behind.

The device is the one of `second_device`: an operation that meets a tensor of the CPU beside its own
fails, so a run that ends has moved everything.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import second_device
from sizewise import config as configs
from sizewise.cli import app
from sizewise.engines.pool import PoolEngine
from sizewise.errors import ConfigError
from sizewise.runs import catalogue, deployment, session
from sizewise.torch_tools import placement

pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")

METHODS = sorted(catalogue.names("methods"))

TINY: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "cnn", "args": {"layers": [4, 6, 6]}},
    "data": {"train_limit": 60, "test_limit": 30},
    "fleet": {"devices": 4, "per_round": 3, "ratios": [0.7, 2.0]},
    "recipe": {"batch": 8, "lr": 0.05, "eval_batch": 15},
}
OF_METHODS: dict[str, Any] = {
    "fedgkt": {"client": "cnn", "client_args": {"layers": [4, 6]}, "server_epochs": 1},
    "fedepth": {"data": "buffered"},
    "m-fedepth": {},
    "heterofl": {"mask_labels": True},
}
RATIOS = {"local": [1.0], "fedin": [2.0], "fedgkt": [2.0]}


@pytest.fixture(scope="module", autouse=True)
def _second_device() -> None:
    second_device.load()


def config_of(method: str, device: str = "cpu", **tables: Any) -> configs.Config:
    fleet = {**TINY["fleet"], "ratios": RATIOS.get(method, TINY["fleet"]["ratios"])}
    chosen = {"name": method, **OF_METHODS.get(method, {})}
    values = {**TINY, "fleet": fleet, "method": chosen, "engine": {"device": device}}
    for name, table in tables.items():
        values[name] = {**values["recipe"], **table} if name == "recipe" else table
    return configs.from_dict(values)


def run(config: configs.Config, path: Path, pool: PoolEngine | None = None) -> dict[str, Any]:
    with session.started(config, path, engine=pool) as federation:
        found = federation.run()
    return {name: found[name] for name in ("state_sha256", "sizes", "peak_bytes", "flops")}


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolEngine]:
    """Two workers, each with a device of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in second_device.environment().items():
            patch.setenv(name, value)
        engine = PoolEngine(2, placement.every("secondary"))
        yield engine
        engine.close()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_with_the_bits_of_the_cpu(
    method: str, pool: PoolEngine, tmp_path: Path
) -> None:
    expected = run(config_of(method), tmp_path / "cpu")
    there = config_of(method, "secondary")
    torch.accelerator.reset_peak_memory_stats()
    assert run(there, tmp_path / "secondary") == expected
    assert torch.accelerator.max_memory_allocated() > 0
    assert run(there, tmp_path / "pool", pool) == expected


@pytest.mark.parametrize(
    "recipe",
    [
        {"norm": "sbn", "augment": "crop-flip"},
        {"eval_memory": "1MB", "optimizer": "adam"},
        {"levers": "auto", "clip": 1.0, "proximal": 0.1},
        {"levers": ["checkpoint", "bf16_activations", "bf16_state"], "optimizer": "amsgrad"},
    ],
    ids=["sbn", "low-memory", "auto", "bf16"],
)
def test_recipes(recipe: dict[str, Any], tmp_path: Path) -> None:
    model = {"name": "preresnet8"}
    tables = {"model": model, "recipe": recipe, "rounds": 1}
    expected = run(config_of("fedavg", **tables), tmp_path / "cpu")
    assert run(config_of("fedavg", "secondary:1", **tables), tmp_path / "secondary") == expected
    assert expected["peak_bytes"]


def test_devices_that_train_together(tmp_path: Path) -> None:
    model = {"name": "mlp", "args": {"hidden": [8]}}
    found = [
        run(
            config_of("fedavg", device, model=model, engine={"together": 4, "device": device}),
            tmp_path / device,
        )
        for device in ("cpu", "secondary")
    ]
    assert found[0] == found[1]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = run(config_of("fedavg", "secondary", rounds=3), tmp_path / "whole")
    run(config_of("fedavg", "secondary", rounds=2), tmp_path / "parts")
    with session.resumed(tmp_path / "parts", overrides=["rounds=3"]) as federation:
        assert federation.run()["state_sha256"] == whole["state_sha256"]


def test_what_is_exported_is_what_the_cpu_exports(tmp_path: Path) -> None:
    files = []
    for device in ("cpu", "secondary"):
        run(config_of("heterofl", device), tmp_path / device)
        out = tmp_path / f"{device}.safetensors"
        deployment.export(tmp_path / device, out, memory=10**7)
        files.append(out.read_bytes())
        assert json.loads(out.with_suffix(".json").read_text())["task"]["device"] == "cpu"
    assert files[0] == files[1]


def test_auto_is_the_accelerator_and_is_written_down(tmp_path: Path) -> None:
    run(config_of("fedavg", "auto", rounds=1), tmp_path / "run")
    assert configs.load(tmp_path / "run" / "config.toml").engine.device == "secondary"


def test_what_is_not_here_is_refused(tmp_path: Path) -> None:
    for name in ("cuda", "secondary:2", "secnd", "meta"):
        wanted = f"{name!r}, and this machine has cpu, secondary:0, s"
        with pytest.raises(ConfigError, match=wanted):
            run(config_of("fedavg", name), tmp_path / "run")
    out = str(tmp_path / "run")
    said = CliRunner().invoke(app, ["run", "--set", "engine.device=cuda", "--out", out])
    assert isinstance(said.exception, ConfigError)
    assert said.exception.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_a_tensor_that_was_left_behind_is_an_error() -> None:
    there = torch.ones(3, device="secondary")
    for operation in (
        torch.add,
        torch.mul,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: y[x.long()],
    ):
        with pytest.raises(RuntimeError, match=r"left behind|same device"):
            operation(torch.ones(3), there)
    with pytest.raises(RuntimeError, match=r"left behind|same device"):
        torch.zeros(()).add_(there.sum())
