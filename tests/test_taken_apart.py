"""Methods that take models apart, with models whose own forward has to stay in charge."""

from pathlib import Path
from typing import Any

import pytest
import torch

from depth_cases import make_runner, make_task, plan_for, start, train
from in_place_cases import Tokens
from rounds import do_round
from sizewise import config, session
from sizewise.errors import ConfigError, ModelError
from sizewise.families.base import Method
from sizewise.fleet.devices import Device
from sizewise.methods import find
from sizewise.methods.fedepth import FeDepth
from sizewise.methods.fedepth.blocks import Blocks
from sizewise.runs import deployment
from sizewise.training.loop import freeze
from sizewise.training.task import Task

MODELS = (
    *("in_place_cases:Tokens", "in_place_cases:Stages"),
    *("in_place_cases:SharedLayers", "in_place_cases:Altering"),
)
METHODS: dict[str, dict[str, Any]] = {
    "fedepth": {},
    "fedepth around": {"skip": "bypass", "models": 1},
    "fedepth buffered": {"data": "buffered", "models": 1},
    "m-fedepth": {"models": 1},
    "depthfl": {},
    "inclusivefl": {},
    "nefl": {"scaling": "depth"},
    "nefl absorb": {"scaling": "depth", "steps": "absorb_learn"},
}


def made(name: str, task: Task, options: dict[str, Any]) -> Method:
    kind = find(name.partition(" ")[0])
    return kind(task, kind.Options(**options))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_those_predicted_and_every_round_learns(name: str, model: str) -> None:
    recipe = {"batch": 4, "norm": "tracked"}
    unlimited = made(name, make_task(model, **recipe), METHODS[name])
    full = unlimited.peak(unlimited.main)
    # Of one block, nothing is smaller than all; exits of maps have weights of their own.
    least = {MODELS[2]: 1.0, MODELS[3]: 0.95}.get(model, 0.8)
    budgets = tuple(int(share * full) for share in (least, 1.0, 2.0))
    method = made(name, make_task(model, budgets=budgets, **recipe), METHODS[name])
    devices = [Device(number, "any", budget) for number, budget in enumerate(budgets)]
    state, runner = method.setup(), make_runner(method)
    for round_index in range(2):
        before = state
        state, updates = do_round(runner, state, round_index, devices)
        for update, device in zip(updates, devices, strict=True):
            # A fixed round's batches are held as well, as far as there is room.
            held = name == "fedepth buffered" and update.peak_bytes > update.plan.predicted
            assert held or update.peak_bytes == update.plan.predicted
            assert update.peak_bytes <= (device.memory or 0)
        assert any(not torch.equal(state.tensors[n], t) for n, t in before.tensors.items())
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())


def test_a_run_of_blocks_is_the_partial_forward_written_by_hand() -> None:
    method = FeDepth(make_task(MODELS[0]))
    module: Any = method.submodels.build(plan_for(method, [(1, 2)]).submodel)
    reference: Any = method.task.build()
    x = torch.randn(5, 1, 8, 8)
    blocks = Blocks((1,), (0,), stem=False)
    learning = plan_for(method, [(1, 2)]).stages[0].trainable
    freeze(module, learning)
    module(x, blocks).square().sum().backward()
    reference.logits(x, (0, 1)).square().sum().backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    learned = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    head = {"norm.weight", "norm.bias", "scale", "classifier.weight", "classifier.bias"}
    layer = {n for n in expected if n.startswith("encoder.layer.1.")}
    assert {n.removeprefix("model.") for n in learned} == head | layer
    for name, gradient in learned.items():
        assert torch.equal(gradient, expected[name.removeprefix("model.")])


def test_frozen_parts_come_back_as_they_were() -> None:
    method = FeDepth(make_task(MODELS[0]))
    plan = plan_for(method, [(2, 3)])
    state = start(method, plan)
    update = train(make_runner(method), state, plan)
    parts = {method.task.parts.part_of(name.removeprefix("model.")) for name in update.tensors}
    assert parts == {2, "head"}


def test_nothing_smaller_than_a_named_block_is_needed() -> None:
    task = make_task(MODELS[1], anatomy={"blocks": "stages"})
    assert task.parts.blocks == ("stages.0", "stages.1")


def test_a_run_has_the_same_bits_anywhere_and_its_models_can_be_exported(tmp_path: Path) -> None:
    chosen = {
        "rounds": 2,
        "model": {"name": MODELS[0]},
        "data": {"name": "digits", "train_limit": 60, "test_limit": 20},
        "fleet": {"devices": 4, "per_round": 4, "budgets": ["40kB", "200kB"]},
        "method": {"name": "depthfl"},
        "recipe": {"batch": 4},
    }
    found = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        given = config.from_dict({**chosen, "engine": {"workers": workers}})
        with session.started(given, folder) as federation:
            found.append(federation.run()["state_sha256"])
    assert found[0] == found[1]
    deployment.export(folder, tmp_path / "small.safetensors", size="depth 1")
    with pytest.raises(ConfigError, match=r"torch\.export cannot follow 'depth 1' .* as safetens"):
        deployment.export(folder, tmp_path / "small.pt2", size="depth 1")
    assert not (tmp_path / "small.pt2").exists()


def test_what_needs_parts_in_turn_says_so() -> None:
    task = make_task(MODELS[0])
    with pytest.raises(ConfigError, match="in 'in_place_cases:Tokens' only its own forward"):
        FeDepth(task, FeDepth.Options(link="conv")).scheduler.schedule(1000)
    with pytest.raises(
        ModelError, match=r"recipe\.eval_memory runs a model's stem, blocks and hea"
    ):
        task.low_memory_inference(Tokens(classes=3, image=(1, 8, 8)))
    with pytest.raises(ModelError, match="sharing a stem and a head runs a model's stem"):
        find("fedin")(task).setup()
    with pytest.raises(ModelError, match="the paper's accounting runs a model's stem"):
        FeDepth(task, FeDepth.Options(assign="ratio")).scheduler.schedule(0.5)
