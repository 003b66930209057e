"""What users bring in their first hour: models of every kind, interrupts, moved data."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sizewise import config as configs
from sizewise.errors import CheckpointError, ConfigError, DataError, ModelError
from sizewise.exchange.plan import TrainingStage
from sizewise.families.base import Method
from sizewise.runs import preparation, session

MODELS = """
import torch
from torch import nn

class Frozen(nn.Module):
    '''A backbone that its owner froze.'''
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Linear(64, 16).requires_grad_(False)
        self.head = nn.Linear(16, classes)
    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())

class Tied(nn.Module):
    '''One matrix under two names.'''
    def __init__(self, classes):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, classes)
    def forward(self, x):
        return self.head(self.second(self.first(x.flatten(1)).relu()).relu())

class Drifting(nn.Module):
    '''A buffer that is not saved, changes in training and is used.'''
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(64, classes)
        self.register_buffer("mean", torch.zeros(64), persistent=False)
    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.head(x - self.mean)

class Orthogonal(nn.Module):
    '''Its start depends on the number of threads.'''
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Linear(64, 256)
        nn.init.orthogonal_(self.body.weight)
        self.head = nn.Linear(256, classes)
    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())

class Constant(nn.Module):
    '''A large tensor as a plain attribute, used through a view.'''
    def __init__(self, classes):
        super().__init__()
        self.mask = torch.ones(500, 64)
        self.head = nn.Linear(64, classes)
    def forward(self, x):
        return self.head(x.flatten(1) * self.mask[:len(x)])

class Keeping(nn.Module):
    '''Keeps an activation, which torch refuses to copy.'''
    def __init__(self, classes):
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, classes)
    def forward(self, x):
        self.features = self.body(x.flatten(1)).relu()
        return self.head(self.features)

def raising(classes):
    raise KeyError("no such backbone")

def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

class Asserting(nn.Module):
    def forward(self, x):
        assert x.shape[-1] == 224
        return x
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "first_hour.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)

    def train(model, workers=1, folder="run", **tables):
        config = configs.from_dict(
            {
                "rounds": 2,
                "model": {"name": f"first_hour:{model}"},
                "fleet": {"devices": 6, "per_round": 4, "budgets": ["5MB"]},
                "recipe": {"lr": 0.05},
                "engine": {"workers": workers},
                **tables,
            }
        )
        with session.started(config, tmp_path / folder) as federation:
            return federation.run()

    return train


def test_what_the_owner_froze_stays_frozen_and_is_not_sent(run, tmp_path):
    result = run("Frozen")
    config = configs.load(tmp_path / "run" / "config.toml")
    start = preparation.prepare(config).method.setup().tensors
    final = load_file(tmp_path / "run" / "final.safetensors")
    assert torch.equal(final["body.weight"], start["body.weight"])
    assert not torch.equal(final["head.weight"], start["head.weight"])
    assert result["bytes_up"] == 2 * 4 * (16 * 10 + 10) * 4
    assert run("Frozen", method={"name": "local"}, folder="local")["accuracy"] > 0.1


def test_tied_weights_travel_once_and_pass_the_server_optimiser(run, tmp_path):
    result = run("Tied", method={"name": "fedadam"})
    assert result["bytes_up"] == 2 * 4 * (64 * 64 + 64 + 64 + 64 * 10 + 10) * 4
    assert "second.weight" not in load_file(tmp_path / "run" / "final.safetensors")


def test_buffers_that_are_not_saved_do_not_pass_from_device_to_device(run):
    alone = run("Drifting", folder="one")["state_sha256"]
    assert run("Drifting", workers=2, folder="two")["state_sha256"] == alone


@pytest.fixture
def _two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads")
def test_the_start_does_not_depend_on_threads(run):
    alone = run("Orthogonal", folder="one")["state_sha256"]
    assert torch.get_num_threads() == 2, "a run gives back the threads that it found"
    assert run("Orthogonal", workers=2, folder="two")["state_sha256"] == alone


def test_plain_tensors_are_predicted_as_they_are_metered(run):
    result = run("Constant")
    assert result["refused"] == []
    config = configs.from_dict({"model": {"name": "first_hour:Constant"}})
    method = preparation.prepare(config).method
    assert result["peak_bytes"]["5MB"] == method.peak(method.main, method.task.stage(0))


def test_a_model_may_keep_an_activation(run):
    assert run("Keeping")["refused"] == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("raising", "no such backbone"),
        ("Asserting", "cannot run on images"),
        ("missing", "missing"),
    ],
)
def test_models_that_fail_end_in_one_sentence(run, tmp_path, model, reason):
    with pytest.raises((ModelError, ConfigError), match=reason) as caught:
        run(model)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_stages_do_not_pay_for_the_gradients_of_earlier_ones(dataset, partition, make_task):
    class TwoStages(Method):
        def stages(self, round_index):
            return (
                TrainingStage(0.1, 1, ("stem", "head"), "ends"),
                TrainingStage(0.1, 1, ("blocks",), "blocks"),
            )

    from sizewise.engines.device_runner import DeviceRunner
    from sizewise.fleet.devices import Device

    method = TwoStages(make_task(args={"hidden": [40, 30]}, batch=4))
    state = method.setup()
    plan = method.plan(state, Device(2, "any"), 0)
    plan = replace(plan, budget=plan.predicted)
    update = DeviceRunner(method, dataset, partition).train(state, plan)
    assert update.peak_bytes == plan.predicted


def test_a_remainder_in_the_second_step_does_not_hide_the_peak(run):
    recipe = {"lr": 0.05, "batch": 200, "epochs": 2}  # 239 samples a device: 200, 39, 200, 39
    first = run("Tied", recipe=recipe, folder="first")["peak_bytes"]
    engine = {"workers": 1, "enforce": True}
    assert run("Tied", recipe=recipe, folder="all", engine=engine)["peak_bytes"] == first


def test_an_interrupted_session_goes_on_where_it_was(run, tmp_path):
    whole = run("Tied", workers=2)["state_sha256"]
    config = configs.load(tmp_path / "run" / "config.toml")

    def interrupt(line, totals):
        if line["round"] == 1:
            raise KeyboardInterrupt

    with session.started(config, tmp_path / "again") as federation:
        with pytest.raises(KeyboardInterrupt):
            federation.run(interrupt)
        assert federation.run()["state_sha256"] == whole
        assert federation.run()["state_sha256"] == whole, "a finished run is not run again"
    assert len((tmp_path / "again" / "history.jsonl").read_text().splitlines()) == 2


def test_an_abandoned_round_leaves_no_answers_behind(run, tmp_path):
    run("Tied", workers=2)
    config = configs.load(tmp_path / "run" / "config.toml")
    with session.started(config, tmp_path / "again") as federation:
        state = federation.method.setup()
        plans = [
            federation.method.plan(state, federation.fleet.device(number, 0), 0)
            for number in range(6)
        ]
        round_under_way = federation.engine.train(state, plans)
        next(round_under_way)
        round_under_way.close()
        devices = [update.plan.device for update in federation.engine.train(state, plans[3:])]
    assert devices == [3, 4, 5]


def test_other_data_than_at_the_start_is_noticed(run, tmp_path, dataset):
    config = configs.from_dict({"rounds": 2, "model": {"name": "linear"}, "fleet": {"devices": 5}})
    with session.started(config, tmp_path / "own", dataset) as federation:
        federation.run()
    with pytest.raises(DataError, match="was given in memory"), session.resumed(tmp_path / "own"):
        pass
    with session.resumed(tmp_path / "own", dataset) as federation:
        assert federation.run()["rounds"] == 2
    with session.started(config, tmp_path / "digits") as federation:
        federation.run()
    with (
        pytest.raises(CheckpointError, match="data is not what"),
        session.resumed(tmp_path / "digits", dataset),
    ):
        pass


def test_a_file_named_like_a_standard_module_does_no_harm(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')")
    settings = ("rounds=1", "model.name=linear", "method.name=fedavg", "engine.workers=2")
    command = [sys.executable, "-P", "-m", "sizewise.cli", "run", "--out", "run", "--json"]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_shared_memory_that_cannot_be_had_is_one_sentence(monkeypatch):
    from sizewise.engines.shared_tensors import SharedTensors
    from sizewise.errors import EngineError

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"engine\.workers to 1"):
        SharedTensors().write({"w": torch.zeros(10)})
