from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from sizewise import config as configs
from sizewise.common import rng
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut
from sizewise.families.prefixwise import Prefixwise
from sizewise.families.widthwise import Widthwise
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.local import Local
from sizewise.runs import session
from sizewise.runs.folder import Totals
from sizewise.training.task import Task


def train(runner: DeviceRunner, state: State, device: int, round_index: int) -> Update:
    budgets = runner.method.task.budgets
    holder = Device(device, "any", budgets[min(device, len(budgets) - 1)])
    update = runner.train(state, runner.method.plan(state, holder, round_index))
    assert isinstance(update, Update)
    return update


@pytest.fixture
def runner(make_task: Callable[..., Task], dataset: Dataset, partition: Partition) -> DeviceRunner:
    return DeviceRunner(Local(make_task("cnn", norm="tracked")), dataset, partition)


def test_server_never_changes_and_nothing_is_sent(runner: DeviceRunner) -> None:
    state = runner.method.setup()
    updates = [train(runner, state, device, 0) for device in range(3)]
    assert all(update.tensors == {} for update in updates)
    merged = runner.method.merge(state, updates)
    assert all(merged.tensors[name] is tensor for name, tensor in state.tensors.items())
    assert Local.discloses == frozenset()


def test_device_goes_on_from_its_own_model(
    runner: DeviceRunner, make_task: Callable[..., Task]
) -> None:
    state = runner.method.setup()
    first = train(runner, state, 1, 0)
    second = train(runner, replace(state, devices={1: first.device_state}), 1, 1)
    # The same two rounds of FedAvg with this device alone.
    average = DeviceRunner(
        FedAvg(make_task("cnn", norm="tracked")), runner.dataset, runner.partition
    )
    alone = train(average, State(first.device_state), 1, 1)
    assert second.device_state.keys() == alone.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(second.device_state[n], alone.tensors[n]) for n in alone.tensors)
    assert not torch.equal(
        first.device_state["head.linear.weight"], second.device_state["head.linear.weight"]
    )


def test_first_round_starts_from_the_common_weights(
    runner: DeviceRunner, make_task: Callable[..., Task]
) -> None:
    state = runner.method.setup()
    average = DeviceRunner(
        FedAvg(make_task("cnn", norm="tracked")), runner.dataset, runner.partition
    )
    expected = train(average, state, 0, 0).tensors
    found = train(runner, state, 0, 0).device_state
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_device_that_trained_is_deployed(runner: DeviceRunner) -> None:
    state = runner.method.setup()
    assert list(runner.method.deploy(state)) == ["full"]
    updates = [train(runner, state, device, 0) for device in (2, 0)]
    kept = {update.plan.device: update.device_state for update in updates}
    merged = runner.method.merge(state, updates)
    deployed = runner.method.deploy(replace(merged, devices=kept))
    assert list(deployed) == ["device 0", "device 2"]
    for device, device_state in kept.items():
        found = deployed[f"device {device}"].fill().state_dict()
        assert all(torch.equal(found[name], device_state[name]) for name in device_state)


def test_summary_metric_is_the_mean_over_devices(runner: DeviceRunner) -> None:
    assert runner.method.summary_metric({"device 0": 0.2, "device 2": 0.6}) == pytest.approx(0.4)


# ---- the size that fits


def sized(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition, sizes: str
) -> tuple[DeviceRunner, list[str]]:
    """Return three devices that hold a step of sizes 1 and 2 of three, and of the whole model."""
    task = make_task("mlp", {"hidden": [8] * 4}, epochs=2)
    exits = (1, 2) if sizes == "depth" else ()
    found: Any = Widthwise(task)
    submodels = [found.narrow(width) for width in (0.5, 0.75, 1.0)]
    if sizes == "depth":
        found = Prefixwise(task, Prefixwise.Options(exits=exits))
        submodels = [found.trainee(depth) for depth in (1, 2, 3)]
    peaks = tuple(found.peak(submodel) for submodel in submodels)
    local = Local(replace(task, budgets=peaks), Local.Options(sizes=sizes, exits=exits))
    return DeviceRunner(local, dataset, partition), [submodel.label for submodel in submodels]


@pytest.mark.parametrize("sizes", ["depth", "width"])
def test_each_device_trains_the_size_that_fits_it_alone(
    sizes: str, make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    runner, names = sized(make_task, dataset, partition, sizes)
    method, state = runner.method, runner.method.setup()
    assert [submodel.label for submodel in method.sizes(state)] == names
    updates = [train(runner, state, device, 0) for device in range(3)]
    assert [update.plan.submodel.label for update in updates] == names
    for update in updates:
        assert update.tensors == {}
        assert update.peak_bytes == update.plan.predicted == update.plan.budget
        # A plain loop over the same batches, from the common start.
        submodel, number = update.plan.submodel, update.plan.device
        model = method.submodels.build(submodel)
        model.load_state_dict(cut(state.tensors, method.submodels.view(submodel)), strict=False)
        recipe = method.task.recipe
        optimizer = torch.optim.SGD(
            model.train().parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay
        )
        rows = partition.shard(number)
        generator = rng.torch_generator(0, "batches", 0, number)
        passes = [rows[torch.randperm(len(rows), generator=generator)] for _ in range(2)]
        for batch in (batch for order in passes for batch in order.split(recipe.batch)):
            if len(batch) > 1:
                optimizer.zero_grad()
                logits = model(runner.transform(dataset.train_inputs[batch], None))
                F.cross_entropy(logits, dataset.train_labels[batch]).backward()
                optimizer.step()
        found = dict(model.state_dict())
        assert update.device_state.keys() == found.keys()
        for name, tensor in update.device_state.items():
            torch.testing.assert_close(tensor, found[name])
    merged = method.merge(state, updates)
    assert all(merged.tensors[name] is tensor for name, tensor in state.tensors.items())
    after = replace(merged, devices={u.plan.device: u.device_state for u in updates})
    expected = [f"device {number} ({name})" for number, name in enumerate(names)]
    assert list(method.deploy(after)) == expected
    assert list(LocalEngine(runner).evaluate(after)) == expected
    for update, size in zip(updates, expected, strict=True):
        deployed = method.deploy(after)[size].fill().state_dict()
        assert all(torch.equal(deployed[name], t) for name, t in update.device_state.items())
    least = method.task.budgets[0] or 0
    with pytest.raises(BudgetTooSmall):
        method.plan(state, Device(0, "weak", 100 if sizes == "width" else least - 1), 0)


@pytest.mark.parametrize("sizes", ["depth", "width"])
def test_a_device_of_another_size_than_before_starts_anew(
    sizes: str, make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    runner, _ = sized(make_task, dataset, partition, sizes)
    state = runner.method.setup()
    first = train(runner, state, 0, 0)
    known = replace(state, devices={0: first.device_state})
    same, upgraded = (Device(0, "any", budget) for budget in runner.method.task.budgets[:2])
    for device, goes_on in ((same, True), (upgraded, False)):
        plan = runner.method.plan(known, device, 1)
        remembering, without = runner.train(known, plan), runner.train(state, plan)
        assert isinstance(remembering, Update)
        assert isinstance(without, Update)
        name = next(name for name in without.device_state if name.endswith("linear.weight"))
        assert torch.equal(remembering.device_state[name], without.device_state[name]) != goes_on


TABLES: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "mlp", "args": {"hidden": [16, 16, 16, 16]}},
    "data": {"train_limit": 60, "test_limit": 20},
    "fleet": {"devices": 3, "per_round": 3, "budgets": ["23kB", "27kB", "1MB"]},
    "method": {"name": "local", "sizes": "depth", "exits": [1, 2]},
    "recipe": {"batch": 4},
}


def test_workers_and_a_stop_do_not_change_a_bit(tmp_path: Path) -> None:
    found = []
    for workers in (1, 2):
        path = tmp_path / f"{workers}"
        config = configs.from_dict({**TABLES, "engine": {"workers": workers}})
        with session.started(config, path) as federation:
            if workers == 2:
                federation.round(federation.method.setup(), Totals(), 0)
            else:
                found.append(federation.run())
        if workers == 2:
            with session.resumed(path) as federation:
                found.append(federation.run())
    assert found[0]["sizes"] == found[1]["sizes"]
    assert len({name.partition("(")[2] for name in found[0]["sizes"]}) == 3


def test_depths_cannot_be_evaluated_part_by_part(make_task: Callable[..., Task]) -> None:
    task = make_task("cnn", eval_memory=10**6)
    with pytest.raises(ConfigError, match=r"which recipe\.eval_memory cannot; leave it out"):
        Local(task, Local.Options(sizes="depth"))
