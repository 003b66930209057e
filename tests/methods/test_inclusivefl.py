from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from conftest import do_round
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.inclusivefl import InclusiveFL
from sizewise.surgery.anatomy import Staged
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

Tasks = Callable[..., Task]
Run = Callable[..., State]

VIT = {"depth": 4, "dim": 8, "heads": 2}
WEIGHT = "attention.query.weight"


def method(make_task: Tasks, recipe: dict[str, Any] | None = None, **options: Any) -> InclusiveFL:
    """Two sizes of a transformer: two blocks and four."""
    task = replace(
        make_task("vit", VIT, **{"server": "fedavg", "server_lr": 1.0, **(recipe or {})}),
        ratios=(0.5, 1.0),
        budgets=(1, 2),
    )
    return InclusiveFL(task, InclusiveFL.Options(exits=(2,), assign="ratio", **options))


def sent(chosen: InclusiveFL, state: State, ratio: float, samples: int = 1) -> Update:
    """An update in which block n moved by n + 1, and everything else by a half."""
    plan = chosen.plan(state, Device(0, "a", 1, ratio=ratio), 0)
    moved = {}
    for name, tensor in cut(state.tensors, chosen.submodels.view(plan.submodel)).items():
        block = name.split(".")[2] if name.startswith("model.blocks.") else ""
        moved[name] = tensor + (int(block) + 1.0 if block else 0.5)
    return Update(plan, moved, samples=samples, steps=1, loss=0.0)


def step(before: State, after: State, name: str) -> float:
    moved = after.tensors[name] - before.tensors[name]
    assert torch.allclose(moved, moved.flatten()[0].expand_as(moved), atol=1e-5)
    return round(float(moved.flatten()[0]), 4)


def test_the_last_block_takes_the_mean_update_of_the_larger_size(make_task: Tasks) -> None:
    chosen = method(make_task, beta=1.0)
    start = chosen.setup()
    first = chosen.merge(start, [sent(chosen, start, 0.5), sent(chosen, start, 1.0)])
    own = f"blocks.1.{WEIGHT}@depth 1"
    assert step(start, first, own) == 0.0  # Momentum is 0 at first.
    second = chosen.merge(first, [sent(chosen, first, 0.5)])
    assert step(first, second, own) == 3.0  # Blocks 2, 3 and 4 moved by 2, 3 and 4.
    third = chosen.merge(second, [sent(chosen, second, 0.5)])
    assert step(second, third, own) == 3.0  # Until the larger size is trained again.


def test_without_distillation_it_keeps_its_own_update(make_task: Tasks) -> None:
    chosen = method(make_task, beta=0.0)
    start = chosen.setup()
    first = chosen.merge(start, [sent(chosen, start, 0.5), sent(chosen, start, 1.0)])
    second = chosen.merge(first, [sent(chosen, first, 0.5)])
    for before, after in ((start, first), (first, second)):
        assert step(before, after, f"blocks.1.{WEIGHT}@depth 1") == 2.0


def test_in_between_is_a_mixture(make_task: Tasks) -> None:
    chosen = method(make_task, beta=0.25)
    start = chosen.setup()
    first = chosen.merge(start, [sent(chosen, start, 0.5), sent(chosen, start, 1.0)])
    own = f"blocks.1.{WEIGHT}@depth 1"
    assert step(start, first, own) == 0.75 * 2
    second = chosen.merge(first, [sent(chosen, first, 0.5)])
    assert step(first, second, own) == 0.25 * 3 + 0.75 * 2


def test_the_stem_and_lower_blocks_are_shared_and_the_rest_is_not(make_task: Tasks) -> None:
    chosen = method(make_task)
    small, large = chosen.trainee(1), chosen.trainee(2)
    views = {"small": chosen.submodels.view(small), "large": chosen.submodels.view(large)}
    for name in ("stem.position", f"blocks.0.{WEIGHT}"):
        assert {view[f"model.{name}"].name for view in views.values()} == {name}
    assert views["small"][f"model.blocks.1.{WEIGHT}"].name == f"blocks.1.{WEIGHT}@depth 1"
    assert views["large"][f"model.blocks.1.{WEIGHT}"].name == f"blocks.1.{WEIGHT}"
    heads = [
        {place.name for name, place in view.items() if "head" in name or "exits" in name}
        for view in views.values()
    ]
    assert all(heads)
    assert heads[0].isdisjoint(heads[1])


def test_shared_blocks_are_averaged_by_the_data_behind_them(make_task: Tasks) -> None:
    chosen = method(make_task, beta=0.0)
    start = chosen.setup()
    small, large = sent(chosen, start, 0.5, samples=3), sent(chosen, start, 1.0, samples=1)
    tensors = {name: tensor + 4 for name, tensor in large.tensors.items()}
    after = chosen.merge(start, [small, replace(large, tensors=tensors)])
    assert step(start, after, f"blocks.0.{WEIGHT}") == (3 * 1 + 1 * 5) / 4
    assert step(start, after, f"blocks.1.{WEIGHT}") == 2 + 4
    assert step(start, after, f"blocks.1.{WEIGHT}@depth 1") == 2


def test_every_size_has_its_own_server_optimiser(make_task: Tasks) -> None:
    recipe = {"server": "fedadam", "server_lr": 0.1, "server_tau": 1e-9, "server_momentum": 0.0}
    chosen = method(make_task, recipe | {"server_beta2": 0.0}, beta=0.0, server_lrs=(0.1, 0.5))
    start = chosen.setup()
    after = chosen.merge(start, [sent(chosen, start, 0.5), sent(chosen, start, 1.0)])
    # Adam without moments takes steps of the size of its rate, whatever the gradient.
    assert step(start, after, f"blocks.1.{WEIGHT}@depth 1") == 0.1
    assert step(start, after, f"blocks.3.{WEIGHT}") == 0.5
    assert step(start, after, f"blocks.0.{WEIGHT}") == 0.3
    kept = {key.split("/")[1] for key in after.server_state if key.startswith("server/")}
    assert kept == {"depth 1", "depth 2"}


def test_adamw_of_each_size_is_that_of_torch(make_task: Tasks) -> None:
    """Without sharing every size is alone with its optimiser, over two rounds and a rest."""
    recipe = {"server": "fedadamw", "server_lr": 0.02, "server_tau": 1e-6}
    recipe |= {"server_beta2": 0.999, "server_weight_decay": 0.1}
    chosen = method(make_task, recipe, beta=0.0, sharing=False)
    state = chosen.setup()
    names = {0.5: f"blocks.1.{WEIGHT}@depth 1", 1.0: f"blocks.1.{WEIGHT}"}
    weights = {r: nn.Parameter(state.tensors[name].clone()) for r, name in names.items()}
    optimizers = {
        r: torch.optim.AdamW([w], 0.02, (0.9, 0.999), 1e-6, 0.1) for r, w in weights.items()
    }
    for trained in ((0.5, 1.0), (1.0,), (0.5, 1.0)):
        state = chosen.merge(state, [sent(chosen, state, ratio) for ratio in trained])
        for ratio in trained:
            weights[ratio].grad = torch.full_like(weights[ratio], -2.0)  # Block 2 moves by 2.
            optimizers[ratio].step()
        for ratio, name in names.items():
            torch.testing.assert_close(state.tensors[name], weights[ratio].detach())


def test_all_sizes_begin_with_the_same_blocks(make_task: Tasks) -> None:
    chosen = method(make_task)
    state = chosen.setup()
    whole = own_tensors(chosen.task.build())
    for name in (f"blocks.0.{WEIGHT}", f"blocks.1.{WEIGHT}"):
        assert torch.equal(state.tensors[name], whole[name])
    assert torch.equal(state.tensors[f"blocks.1.{WEIGHT}@depth 1"], whole[f"blocks.1.{WEIGHT}"])


def test_without_sharing_sizes_are_apart(make_task: Tasks) -> None:
    chosen = method(make_task, sharing=False, beta=0.0)
    start = chosen.setup()
    after = chosen.merge(start, [sent(chosen, start, 0.5)])
    large = chosen.submodels.view(chosen.trainee(2)).values()
    assert all(torch.equal(after.tensors[s.name], start.tensors[s.name]) for s in large)
    small = chosen.submodels.view(chosen.trainee(1)).values()
    assert not any(torch.equal(after.tensors[s.name], start.tensors[s.name]) for s in small)


def test_one_size_is_fedavg(make_task: Tasks, federate: Run) -> None:
    task = make_task("resnet8", {})
    alone, fedavg = federate(InclusiveFL(task)), federate(FedAvg(task))
    for name, tensor in fedavg.tensors.items():
        assert torch.allclose(alone.tensors[name], tensor, atol=1e-6)


@pytest.mark.parametrize(("model", "args"), [("vit", VIT), ("resnet14", {})])
def test_it_trains_any_model_within_bytes(
    make_task: Tasks, dataset: Dataset, partition: Partition, model: str, args: Any
) -> None:
    free = InclusiveFL(make_task(model, args))
    stage = free.task.stage(0)
    peaks = [free.peak(free.trainee(depth), stage) for depth in (1, len(free.stops))]
    task = replace(free.task, budgets=tuple(peaks), ratios=(0.5, 1.0), enforce=True)
    runner = DeviceRunner(InclusiveFL(task), dataset, partition)
    state = runner.method.setup()
    for round_index in range(2):
        state, updates = do_round(runner, state, round_index)
        for update in updates:
            assert update.peak_bytes <= update.plan.budget  # type: ignore[operator]
    assert len({update.plan.submodel.label for update in updates}) == 2
    assert len(runner.method.deploy(state)) == 2
    assert any(key.startswith("momentum/") for key in state.server_state)


def frozen(classes: int) -> nn.Module:
    """Four equal blocks, of which the first two are their owner's."""
    model = Staged(nn.Flatten(), [nn.Linear(16, 16) for _ in range(4)], nn.Linear(16, classes))
    model.blocks[:2].requires_grad_(False)
    return model


def tied(classes: int) -> nn.Module:
    """Four blocks that share their weights, not their biases."""
    model = Staged(nn.Flatten(), [nn.Linear(16, 16) for _ in range(4)], nn.Linear(16, classes))
    for block in model.blocks[1:]:
        block.weight = model.blocks[0].weight  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("model", ["frozen", "tied"])
def test_models_of_ones_own(
    make_task: Tasks, dataset: Dataset, partition: Partition, model: str
) -> None:
    task = make_task(f"{__name__}:{model}", {}, server="fedavg", server_lr=1.0)
    task = replace(task, budgets=(1, 2), ratios=(0.5, 1.0))
    options = InclusiveFL.Options(exits=(2,), assign="ratio", beta=0.5)
    runner = DeviceRunner(InclusiveFL(task, options), dataset, partition)
    start = state = runner.method.setup()
    for round_index in range(2):
        state, _ = do_round(runner, state, round_index)
    still = {name for name, t in start.tensors.items() if torch.equal(state.tensors[name], t)}
    owned = {f"blocks.{n}.{t}" for n in ("0", "1") for t in ("weight", "bias")}
    owned |= {"blocks.1.weight@depth 1", "blocks.1.bias@depth 1"}
    assert still == (owned if model == "frozen" else set())


def test_bad_options_are_refused(make_task: Tasks) -> None:
    with pytest.raises(ConfigError, match=r"method.beta must be in \[0, 1\], not 2"):
        InclusiveFL.Options(beta=2)
    with pytest.raises(ConfigError, match="must all be positive"):
        InclusiveFL.Options(server_lrs=(0.0,))
    with pytest.raises(ConfigError, match="each of the 2 sizes that devices train, not 3"):
        method(make_task, server_lrs=(1.0, 1.0, 1.0)).setup()
