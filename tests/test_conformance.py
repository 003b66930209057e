"""What methods that cut by width must do, whatever their code: who trains and merges which entry.

What needs no method, or only one, is with what it tests:

    widths                    test_widths.py, test_rounding_is_that_of_exact_arithmetic
    cut, then embed           test_cutting.py, test_cut_then_merge_is_exact_where_covered
    residual streams          test_cutting.py, test_cut_equals_masked
    static batch norm         test_norms.py, test_recalibration_is_the_mean_of_batch_statistics
    batch statistics          test_norms.py, test_batch_policy_depends_on_the_batch_in_evaluation
    FedIN                     test_fedin_intermediate.py and test_fedin.py
    FedGKT                    test_fedgkt_transfer.py, test_teacher_logits_are_matched_by_sample

Below them are promises that all these methods share.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import devices_of, do_round
from sizewise import config as configs
from sizewise.data import partitions
from sizewise.data.augment import Transform
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines import Engine
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.engines.pool import PoolEngine
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut, grid
from sizewise.families.base import Method
from sizewise.fleet.devices import Device, FleetConfig
from sizewise.fleet.making import make_fleet
from sizewise.methods import find
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.fedrolex import FedRolex
from sizewise.methods.fjord import FjORD
from sizewise.methods.heterofl import HeteroFL
from sizewise.methods.splitmix import SplitMix
from sizewise.runs import preparation
from sizewise.runs.federation import Federation
from sizewise.runs.folder import RunFolder
from sizewise.training.loop import Shard
from sizewise.training.task import Task

Tasks = Callable[..., Task]
Run = Callable[..., State]


def make(name: str, task: Task, **options: Any) -> Method:
    method = find(name)
    return method(task, method.Options(**options))


def drowsy(classes: int) -> nn.Module:
    """A model with dropout, whose factory takes no width."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, classes))


# ---- slicing and aggregation


def test_one_device_alone_puts_its_bits_where_they_belong(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", shares=(0.5, 1), weighting="equal")
    runner = DeviceRunner(HeteroFL(task), dataset, partition)
    state = runner.method.setup()
    update = runner.train(state, runner.method.plan(state, devices_of(task)[0], 0))
    assert isinstance(update, Update)
    assert update.plan.submodel.label == "width 0.5"
    merged = runner.method.merge(state, [update]).tensors
    expected = {name: tensor.clone() for name, tensor in state.tensors.items()}
    for local, place in runner.method.submodels.view(update.plan.submodel).items():
        index = ... if place.index is None else grid(place.index, expected[place.name].shape)
        expected[place.name][index] = update.tensors[local]
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert not torch.equal(merged["head.linear.weight"], state.tensors["head.linear.weight"])


def test_nested_widths_overlap_is_the_mean(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    method = HeteroFL(make_task(args={"hidden": [6, 4]}, shares=(0.5, 1)))
    state, runner = method.setup(), DeviceRunner(method, dataset, partition)
    plans = [method.plan(state, device, 0) for device in devices_of(method.task)[:2]]
    small, large = (runner.train(state, plan) for plan in plans)
    assert isinstance(small, Update)
    assert isinstance(large, Update)
    assert (small.samples, large.samples) == (5, 10)
    merged = method.merge(state, [small, large]).tensors["blocks.0.linear.weight"]
    narrow, wide = (u.tensors["blocks.0.linear.weight"] for u in (small, large))
    assert narrow.shape == (2, 3)
    torch.testing.assert_close(merged[:2, :3], (5 * narrow + 10 * wide[:2, :3]) / 15)
    ring = torch.ones(4, 6, dtype=torch.bool)
    ring[:2, :3] = False
    torch.testing.assert_close(merged[ring], wide[ring])


def test_every_channel_is_trained_as_often(make_task: Tasks) -> None:
    method = FedRolex(make_task(args={"hidden": [8, 4]}), FedRolex.Options(widths=(0.375,)))
    state = method.setup()
    seen = {name: torch.zeros(len(state.tensors[name])) for name in state.tensors}
    for round_index in range(8):
        plan = method.plan(state, Device(0, "any"), round_index)
        for place in method.submodels.view(plan.submodel).values():
            seen[place.name][place.index[0] if place.index else ...] += 1
    assert (seen["stem.linear.bias"] == 3).all()  # Of 8 channels, ceil(3) in 8 rounds.
    assert (seen["blocks.0.linear.bias"] == 4).all()  # Of 4 channels, ceil(1.5) in twice 4.
    assert (seen["head.bias"] == 8).all()


def test_rows_of_classes_that_nobody_owns_are_unchanged(make_task: Tasks, dataset: Dataset) -> None:
    rows = [torch.nonzero(dataset.train_labels == label).flatten() for label in (0, 2)]
    partition = Partition(torch.cat(rows), torch.tensor([0, len(rows[0]), 20]))
    task = make_task(shares=(0.5, 1))
    method = HeteroFL(task, HeteroFL.Options(mask_labels=True))
    state, runner = method.setup(), DeviceRunner(method, dataset, partition)
    plans = [method.plan(state, device, 0) for device in devices_of(task)[:2]]
    updates = [runner.train(state, plan) for plan in plans]
    merged = method.merge(state, updates).tensors  # type: ignore[arg-type]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(merged[name][1], state.tensors[name][1])
        assert (merged[name][2] != state.tensors[name][2]).all()
    # Class 0 belongs to the narrow device, which reads the first 3 of 5 hidden units.
    assert torch.equal(merged["head.weight"][0, 3:], state.tensors["head.weight"][0, 3:])
    assert (merged["head.weight"][0, :3] != state.tensors["head.weight"][0, :3]).all()


FULL = {
    "heterofl": {},
    "fedrolex": {},
    "feddropout": {},
    "fjord": {"widths": (1.0,)},
    "splitmix": {"atom": 1.0},
    "small": {},
    "exclusive": {},
    "alllarge": {},
}


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("mlp", {"optimizer": "adam"}),
        ("cnn", {"norm": "tracked"}),
        ("preresnet8", {}),
        (f"{__name__}:drowsy", {"proximal": 0.1}),
    ],
    ids=["mlp", "cnn", "preresnet8", "dropout"],
)
def test_whole_models_are_fedavg_to_the_bit(
    model: str, recipe: dict[str, Any], make_task: Tasks, federate: Run
) -> None:
    task = make_task(model, **recipe)
    expected = plain_names(federate(FedAvg(task)))
    for name, options in FULL.items():
        found = plain_names(federate(make(name, task, **options)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], expected[n]) for n in expected), name


def plain_names(state: State) -> dict[str, Tensor]:
    """Return a state's tensors under the model's own names: without the only base or size."""
    return {
        name.removeprefix("bases.0.").removesuffix("@full"): tensor
        for name, tensor in state.tensors.items()
    }


# ---- SplitMix and FjORD


def test_bases_are_trained_equally_often(make_task: Tasks) -> None:
    method = SplitMix(make_task(args={"hidden": [8]}), SplitMix.Options(atom=0.25))
    fleet = make_fleet(FleetConfig(devices=10, per_round=3), lambda ratio: 0)
    state, counts = method.setup(), Counter[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitMix, "quota", lambda self, device: 1)
        for round_index in range(16):  # 48 turns, 12 times through the deck.
            for device in fleet.sample(0, round_index):
                counts.update(method.plan(state, device, round_index).submodel.numbers)
    assert counts == dict.fromkeys(range(4), 12)


def test_ensemble_is_the_mean_of_as_many_logits_as_the_ratio_holds(make_task: Tasks) -> None:
    method = SplitMix(make_task(args={"hidden": [8]}), SplitMix.Options(atom=0.25))
    state, images = method.setup(), torch.randn(5, 1, 4, 4)
    logits = []
    for base in range(4):
        module = method.task.build(0.25)
        prefix = f"bases.{base}."
        own = {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)}
        module.load_state_dict(own)
        logits.append(module.eval()(images))
    sizes = method.deploy(state)
    assert list(sizes) == ["1 of width 0.25", "2 of width 0.25", "4 of width 0.25"]
    for (size, model), count in zip(sizes.items(), (1, 2, 4), strict=True):
        assert size.startswith(f"{count} ")
        expected = torch.stack(logits[:count]).mean(0)
        torch.testing.assert_close(model.fill().eval()(images), expected)


def test_untouched_bases_are_unchanged(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    method = SplitMix(
        make_task("cnn", shares=(0.25, 0.5)), SplitMix.Options(atom=0.25, assign="ratio")
    )
    state, runner = method.setup(), DeviceRunner(method, dataset, partition)
    plan = method.plan(state, devices_of(method.task)[1], 0)
    (first, second) = plan.submodel.numbers
    merged = method.merge(state, [runner.train(state, plan)]).tensors  # type: ignore[list-item]
    for name, tensor in state.tensors.items():
        trained = name.split(".")[1] in (str(first), str(second))
        assert torch.equal(merged[name], tensor) != trained, name


def test_all_layers_of_a_pass_share_one_width(make_task: Tasks) -> None:
    method = FjORD(make_task("cnn", {"layers": [4, 8, 4]}), FjORD.Options(widths=(0.25, 0.5, 1)))
    submodel = method.trainee(1.0)
    module = method.submodels.module(submodel).train()
    seen: list[int] = []
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[1]))
    labels, shard = torch.tensor([0, 1]), Shard(*[torch.zeros(1)] * 3, Transform("none", (), ()))
    loss = method.loss(submodel, method.task.stage(0), shard)
    drawn = Counter[tuple[int, ...]]()
    for _ in range(60):
        seen.clear()
        list(loss(module, torch.randn(2, 1, 4, 4), labels))
        drawn[tuple(seen)] += 1
    assert drawn.keys() == {(1, 2, 1), (2, 4, 2), (4, 8, 4)}
    assert min(drawn.values()) > 10


def test_corner_is_the_mean_of_exactly_the_devices_that_hold_it(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    task = make_task(args={"hidden": [4, 4]}, shares=(0.25, 0.5, 1))
    method = FjORD(task, FjORD.Options(widths=(0.25, 0.5, 1), assign="ratio"))
    runner, state = DeviceRunner(method, dataset, partition), method.setup()
    merged, updates = do_round(runner, state, 0)
    name = "blocks.0.linear.weight"
    sent = [u.tensors[name if u.plan.device == 0 else f"widest.{name}"] for u in updates]
    assert [tuple(tensor.shape) for tensor in sent] == [(1, 1), (2, 2), (4, 4)]
    for rows in range(4):
        for columns in range(4):
            holding = [
                (update.samples, tensor[rows, columns])
                for update, tensor in zip(updates, sent, strict=True)
                if max(rows, columns) < len(tensor)
            ]
            mean = sum(n * value for n, value in holding) / sum(n for n, _ in holding)
            torch.testing.assert_close(merged.tensors[name][rows, columns], mean)


# ---- promises that all of them share

MIXED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "heterofl": ("heterofl", {}, ["width 0.25", "width 0.5", "full"]),
    "heterofl dynamic": (
        "heterofl",
        {"widths": (1.0, 0.5, 0.25), "levels": "dynamic", "scaler": "norm"},
        ["width 0.25", "width 0.5", "full"],
    ),
    "heterofl masked": (
        "heterofl",
        {"widths": (1.0, 0.5, 0.125), "mask_labels": True},
        ["width 0.125", "width 0.5", "full"],
    ),
    "slimmable": (
        "heterofl",
        {"widths": (0.125, 0.25, 0.5), "slimmable": True, "scaler": "conv"},
        ["width 0.125", "width 0.25", "width 0.5"],
    ),
    "fjord": ("fjord", {"widths": (0.125, 0.25, 0.5)}, ["width 0.125", "width 0.25", "width 0.5"]),
    "fjord distil": ("fjord", {"widths": (0.125, 1.0), "distil": True}, ["width 0.125"]),
    "fjord round": (
        "fjord",
        {"widths": (0.25, 0.5, 1.0), "draw": "round"},
        ["width 0.25", "width 0.5", "full"],
    ),
    "fedrolex": ("fedrolex", {}, ["full"]),
    "fedrolex group": ("fedrolex", {"stride": "group"}, ["full"]),
    "feddropout": ("feddropout", {}, ["full"]),
    "splitmix": ("splitmix", {}, [f"{n} of width 0.25" for n in (1, 2, 4)]),
    "small": ("small", {}, ["width 0.25"]),
    "alllarge": ("alllarge", {}, ["full"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_mixed_budgets(case: str, make_task: Tasks, dataset: Dataset, partition: Partition) -> None:
    name, options, sizes = MIXED[case]
    # Methods that run the full model refuse norms that only some widths train.
    recipe = {"norm": "tracked" if name in ("fedrolex", "feddropout") else "per_width_stats"}
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.25, 0.5, 1), **recipe)
    method = make(name, task, **options)
    runner, state = DeviceRunner(method, dataset, partition), method.setup()
    for round_index in range(2):
        merged, updates = do_round(runner, state, round_index)
        covered = {n: torch.zeros(t.shape, dtype=torch.bool) for n, t in state.tensors.items()}
        for update in updates:
            view = method.submodels.view(update.plan.submodel)
            assert update.tensors.keys() == view.keys()
            for place in view.values():
                index = ... if place.index is None else grid(place.index, covered[place.name].shape)
                covered[place.name][index] = True
            budget = update.plan.budget
            assert math.isfinite(update.loss)
            assert (budget is None) == method.options.ignores_budgets
            assert update.peak_bytes <= update.plan.predicted  # type: ignore[operator]
            assert budget is None or update.plan.predicted <= budget  # type: ignore[operator]
        assert merged.tensors.keys() == state.tensors.keys()
        for tensor_name, tensor in merged.tensors.items():
            old, mask = state.tensors[tensor_name], covered[tensor_name]
            assert torch.isfinite(tensor).all()
            assert torch.equal(tensor[~mask], old[~mask]), tensor_name
        state = merged
    assert list(method.deploy(state)) == sizes
    for submodel, model in zip(method.sizes(state), method.deploy(state).values(), strict=True):
        own = model.fill().state_dict()
        for local, tensor in cut(state.tensors, method.submodels.view(submodel)).items():
            assert torch.equal(own[local], tensor)
    scores = LocalEngine(runner).evaluate(state)
    assert list(scores) == sizes
    assert all(math.isfinite(score.loss) and score.samples == 12 for score in scores.values())


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolEngine]:
    engine = PoolEngine(2)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fjord", "widths": [0.25, 0.5, 1]},
        {"name": "splitmix"},
        {"name": "feddropout"},
        {"name": "heterofl", "widths": [0.125, 0.5], "mask_labels": True, "slimmable": True},
        {"name": "nefl", "widths": [0.125, 0.4, 0.9]},
        {"name": "depthfl", "exits": [0], "assign": "ratio"},
        {"name": "inclusivefl", "exits": [0], "assign": "ratio"},
    ],
    ids=lambda method: method["name"],
)
def test_the_number_of_workers_does_not_change_a_bit(
    method: dict[str, Any], pool: PoolEngine, tmp_path: Path
) -> None:
    config = configs.from_dict(
        {
            "rounds": 2,
            "model": {"name": "cnn", "args": {"layers": [8, 8]}},
            "data": {"train_limit": 120, "test_limit": 60, "partition": "shards"},
            "fleet": {"devices": 5, "per_round": 5, "ratios": [0.25, 0.5, 1]},
            "recipe": {"batch": 8, "max_steps": 2},
            "method": method,
        }
    )
    setting = preparation.prepare(config)
    seen = []
    for name in ("one", "two"):
        folder = RunFolder.create(tmp_path / name, config)
        partitions.save(setting.partition, folder.partition)
        engine: Engine = LocalEngine(
            DeviceRunner(setting.method, setting.dataset, setting.partition)
        )
        if name == "two":
            pool.open(config, setting.method, setting.dataset, str(folder.partition))
            engine = pool
        result = Federation(config, setting.method, setting.fleet, engine, folder).run()
        folder.release()
        lines = (folder.path / "updates.jsonl").read_text().splitlines()
        log = [{**json.loads(line), "seconds": 0} for line in lines]
        seen.append(({**result, "seconds": 0, "run_dir": ""}, log))
    assert seen[0] == seen[1]
    assert not seen[0][0]["refused"]
