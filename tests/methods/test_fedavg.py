from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.common import rng
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.errors import ConfigError
from sizewise.exchange.state import State
from sizewise.families.submodels import Width
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.training.task import Task


def run(runner: DeviceRunner, rounds: int) -> State:
    """Train all three devices in every round."""
    engine, state = LocalEngine(runner), runner.method.setup()
    for r in range(rounds):
        plans = [runner.method.plan(state, Device(device, "any"), r) for device in range(3)]
        state = runner.method.merge(state, engine.train(state, plans))  # type: ignore[arg-type]
    return state


def plain_loop(task: Task, dataset: Dataset, partition: Partition) -> dict[str, Tensor]:
    """FedAvg as one would write it by hand, for one model and SGD."""
    recipe = task.recipe
    model: nn.Module = task.build()
    mean, std = dataset.mean[0], dataset.std[0]
    images = (dataset.train_inputs / 255 - mean) / std
    server = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for r in range(task.rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        samples = 0
        for device in range(3):
            rows = partition.shard(device)
            model.load_state_dict(server)
            optimizer = torch.optim.SGD(
                model.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay
            )
            generator = rng.torch_generator(task.seed, "batches", r, device)
            for _ in range(recipe.epochs):
                order = rows[torch.randperm(len(rows), generator=generator)]
                for batch in order.split(recipe.batch):
                    if len(batch) == 1:
                        continue
                    optimizer.zero_grad()
                    F.cross_entropy(model(images[batch]), dataset.train_labels[batch]).backward()
                    optimizer.step()
            for name, tensor in model.state_dict().items():
                total[name] += len(rows) * tensor
            samples += len(rows)
        server = {name: tensor / samples for name, tensor in total.items()}
    return server


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_fedavg_is_the_plain_loop(
    model: str, make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    task = make_task(model, epochs=2, rounds=3)
    state = run(DeviceRunner(FedAvg(task), dataset, partition), 3)
    expected = plain_loop(task, dataset, partition)
    assert state.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state.tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_training_learns(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    runner = DeviceRunner(FedAvg(make_task("cnn", lr=0.1, epochs=4)), dataset, partition)
    before = LocalEngine(runner).evaluate(runner.method.setup())["full"]
    after = LocalEngine(runner).evaluate(run(runner, 4))["full"]
    assert after.samples == 12
    assert after.loss < before.loss
    assert after.values("accuracy")[0] > 0.6


def test_narrow_network_is_trained_by_everybody_and_has_its_own_start(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    method = FedAvg(make_task(args={"hidden": [6, 4]}), FedAvg.Options(width=0.5))
    assert (method.main, method.main.label) == (Width(0.5), "width 0.5")
    state = method.setup()
    assert state.tensors["stem.linear.weight"].shape == (3, 16)
    full = FedAvg(make_task(args={"hidden": [6, 4]})).setup().tensors["stem.linear.weight"]
    assert not torch.equal(state.tensors["stem.linear.weight"], full[:3])
    trained = run(DeviceRunner(method, dataset, partition), 1)
    assert trained.tensors["head.weight"].shape == (3, 2)
    assert list(method.deploy(trained)) == ["width 0.5"]


@pytest.mark.parametrize("width", [0.0, -0.5, 1.5])
def test_width_outside_its_range_is_refused(width: float) -> None:
    with pytest.raises(ConfigError, match=r"method\.width must be in \(0, 1\]"):
        FedAvg.Options(width=width)


def test_weights_are_disclosed() -> None:
    assert FedAvg.discloses == {"weights"}
