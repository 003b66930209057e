"""Budgets hold at run time: plans never cross them, and work that does is ended by name."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sizewise import config as configs
from sizewise import session
from sizewise.data.augment import Transform
from sizewise.errors import BudgetTooSmall
from sizewise.fleet import Device
from sizewise.methods import find, names
from sizewise.plan import Update
from sizewise.recipe import Recipe
from sizewise.task import ModelConfig, Task
from sizewise.training import Shard
from sizewise.view import cut

GREEDY = """
import torch
from torch import nn

class Greedy(nn.Module):
    '''Takes a megabyte more when it really trains than a prediction can see.'''

    def __init__(self, patience):
        super().__init__()
        self.patience = patience
        self.calls = 0

    def forward(self, x):
        if type(x) is torch.Tensor and x.device.type == "cpu" and self.training:
            self.calls += 1
            if self.calls > self.patience:
                scratch = torch.zeros(250_000)
                x = x + scratch[0]
        return x

def build(classes, patience=0):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), Greedy(patience), nn.Linear(32, classes))
"""


@pytest.fixture
def greedy(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(GREEDY)
    monkeypatch.syspath_prepend(tmp_path)

    def run(patience=0, **engine):
        config = configs.from_dict(
            {
                "rounds": 2,
                "model": {"name": "greedy:build", "args": {"patience": patience}},
                "fleet": {"devices": 8, "per_round": 8, "budgets": ["200kB", "2MB"]},
                "recipe": {"lr": 0.05, "batch": 16},
                "engine": engine,
            }
        )
        folder = tmp_path / f"run-{patience}-{len(engine)}"
        with session.started(config, folder) as federation:
            result = federation.run()
        lines = (folder / "updates.jsonl").read_text().splitlines()
        return result, [json.loads(line) for line in lines]

    return run


def test_an_overrun_ends_that_devices_work_and_the_round_goes_on(greedy):
    result, lines = greedy()
    (refusal,) = result["refused"]
    assert refusal["group"] == "200kB"
    assert refusal["times"] == 8
    assert refusal["devices"] == [0, 1, 2, 3]
    assert "200,000" in refusal["reason"]
    assert "in 2 " in refusal["reason"], "the layer is named"
    assert "(250000,)" in refusal["reason"], "the tensor is described"
    trained = [line for line in lines if line["refused"] is None]
    assert {line["group"] for line in trained} == {"2MB"}
    assert len(trained) == 8
    assert all(1_000_000 < line["peak_bytes"] <= 2_000_000 for line in trained)
    assert result["peak_bytes"]["200kB"] is None


def test_an_overrun_in_a_later_step_is_seen_when_every_step_is_metered(greedy):
    calm, _ = greedy(patience=4)
    assert calm["refused"] == []
    strict, _ = greedy(patience=4, enforce=True)
    assert {refusal["group"] for refusal in strict["refused"]} == {"200kB"}


MODELS = [
    ("linear", {}),
    ("mlp", {"hidden": [24]}),
    ("cnn", {"layers": [4, 8]}),
    ("vit", {"depth": 1}),
]


@settings(max_examples=25, deadline=None)
@given(
    method=st.sampled_from(names()),
    model=st.sampled_from(MODELS),
    batch=st.integers(2, 24),
    optimizer=st.sampled_from(["sgd", "adam"]),
    proximal=st.sampled_from([0.0, 0.1]),
    share=st.floats(0.3, 1.7),
)
def test_no_plan_exceeds_its_budget(method, model, batch, optimizer, proximal, share):
    recipe = Recipe(batch=batch, optimizer=optimizer, proximal=proximal)
    task = Task(ModelConfig(*model), recipe, (1, 8, 8), 10)
    chosen = find(method)(task)
    state = chosen.setup()
    ideal = chosen.plan(state, Device(0, "any"), 0)
    device = Device(0, "some", int(ideal.predicted * share))
    try:
        plan = chosen.plan(state, device, 0)
    except BudgetTooSmall as error:
        # What it says would do, does, and one byte less does not.
        device = replace(device, memory=error.needed)
        plan = chosen.plan(state, device, 0)
        with pytest.raises(BudgetTooSmall):
            chosen.plan(state, replace(device, memory=error.needed - 1), 0)
    shard = Shard(
        torch.randint(0, 256, (2 * batch, 1, 8, 8), dtype=torch.uint8),
        torch.randint(0, 10, (2 * batch,)),
        torch.arange(2 * batch),
        Transform("none", (0.5,), (0.5,)),
    )
    update = chosen.train(plan, cut(state.tensors, chosen.view(plan.piece)), shard, {})
    assert isinstance(update, Update)
    assert update.peak_bytes == plan.predicted
    assert update.peak_bytes <= plan.budget
