import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from conftest import do_round
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import BudgetTooSmall, ConfigError, ModelError
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.nefl import NeFL
from sizewise.steps.recipe import Recipe
from sizewise.surgery.anatomy import Staged
from sizewise.training.loop import own_tensors
from sizewise.training.task import ModelConfig, Task

Tasks = Callable[..., Task]
Run = Callable[..., State]

# Blocks of resnet14: two in each of three stages.
FAMILY = {"widths": (0.5, 0.75, 1.0), "blocks": ((0, 2, 4), (0, 1, 2, 4, 5), (0, 1, 2, 3, 4, 5))}


def resnet(make_task: Tasks, model: str = "resnet14", **recipe: Any) -> Task:
    return make_task(model, {}, **{"norm": "tracked", "weighting": "equal", **recipe})


def sent(method: NeFL, number: int, value: float) -> Update:
    """An update of a submodel in which every number is the same."""
    state = method.setup()
    device = Device(number, "a", ratio=None)
    plan = method.plan(state, device, 0)
    submodel = method.nest[number]
    tensors = {
        name: torch.full_like(tensor, value)
        for name, tensor in cut(state.tensors, method.submodels.view(submodel)).items()
    }
    return Update(replace(plan, submodel=submodel), tensors, samples=1, steps=1, loss=0.0)


# ---- averaging


def test_the_averaging_example_by_hand(make_task: Tasks) -> None:
    """Appendix B.3: entries are averaged over the submodels that have the block and the entry."""
    method = NeFL(resnet(make_task), NeFL.Options(**FAMILY))
    state = method.setup()
    merged = method.merge(state, [sent(method, n, v) for n, v in ((0, 1.0), (1, 3.0), (2, 8.0))])
    stem = merged.tensors["stem.conv.weight"][:, 0, 0, 0]  # 8, 12 and 16 channels
    assert stem.tolist() == [4.0] * 8 + [5.5] * 4 + [8.0] * 4
    second = merged.tensors["blocks.1.conv1.weight"][:, :, 0, 0]  # in submodels 2 and 3
    assert torch.all(second[:12, :12] == 5.5)
    assert torch.all(second[12:] == 8)
    assert torch.all(second[:, 12:] == 8)
    fourth = merged.tensors["blocks.3.conv1.weight"]  # in submodel 3 alone
    assert torch.all(fourth == 8)
    entry = merged.tensors["blocks.4.projection.conv.weight"][:, :, 0, 0]
    assert torch.all(entry[:32, :16] == 4)
    head = merged.tensors["head.linear.weight"]  # the channels of the last stage: 32, 48, 64
    assert head[0].tolist() == [4.0] * 32 + [5.5] * 16 + [8.0] * 16
    for submodel, value in zip(method.nest, (1.0, 3.0, 8.0), strict=True):
        own = merged.tensors[f"blocks.0.norm1.weight@{submodel.label}"]
        assert torch.all(own == value)
        assert merged.tensors[f"blocks.0.branch.size@{submodel.label}"] == value


def test_a_submodel_that_nobody_trains_keeps_what_is_its_own(make_task: Tasks) -> None:
    method = NeFL(resnet(make_task), NeFL.Options(**FAMILY))
    state = method.setup()
    merged = method.merge(state, [sent(method, 0, 2.0)])
    own = {name for name in state.tensors if "@" in name and method.nest[0].label not in name}
    assert len(own) > 20
    for name in own:
        assert torch.equal(merged.tensors[name], state.tensors[name])


def test_a_block_in_no_submodel_of_the_round_is_unchanged(make_task: Tasks) -> None:
    method = NeFL(resnet(make_task), NeFL.Options(**FAMILY))
    state = method.setup()
    merged = method.merge(state, [sent(method, 0, 2.0), sent(method, 1, 2.0)])
    for name in ("blocks.3.conv1.weight", "blocks.3.conv2.weight"):
        assert torch.equal(merged.tensors[name], state.tensors[name])
    assert not torch.equal(
        merged.tensors["blocks.1.conv1.weight"], state.tensors["blocks.1.conv1.weight"]
    )


def test_one_submodel_with_fixed_steps_is_fedavg(make_task: Tasks, federate: Run) -> None:
    task = resnet(make_task, "resnet8")
    nefl = federate(NeFL(task, NeFL.Options(steps="fixed", apart=())))
    fedavg = federate(FedAvg(task))
    assert nefl.tensors.keys() == fedavg.tensors.keys()
    for name, tensor in fedavg.tensors.items():
        assert torch.equal(nefl.tensors[name], tensor)


def test_steps_of_submodels_drift_apart(make_task: Tasks, federate: Run) -> None:
    options = NeFL.Options(widths=(0.5, 1.0), blocks=((0, 1, 2), (0, 1, 2)), reach=1)
    task = resnet(make_task, "resnet8", lr=0.2)
    state = federate(NeFL(task, options), rounds=3)
    for number in range(3):
        stem = f"blocks.{number}.branch.size@"
        sizes = [tensor for name, tensor in state.tensors.items() if name.startswith(stem)]
        assert len({1.0, *map(float, sizes)}) == 3


# ---- what is kept apart


@pytest.mark.parametrize(
    ("apart", "expected"),
    [
        ((), set()),
        (("norms",), {"norm1.weight", "norm1.running_mean"}),
        (("norms", "steps"), {"norm1.weight", "norm1.running_mean", "branch.size"}),
        (("*.conv2.weight",), {"conv2.weight"}),
    ],
)
def test_what_is_kept_apart_is_chosen(
    make_task: Tasks, apart: tuple[str, ...], expected: set[str]
) -> None:
    method = NeFL(resnet(make_task, "resnet8"), NeFL.Options(widths=(0.5, 1.0), apart=apart))
    state = method.setup()
    names = ("conv1.weight", "conv2.weight", "norm1.weight", "norm1.running_mean", "branch.size")
    small = method.nest[0].label
    assert {n for n in names if f"blocks.0.{n}@{small}" in state.tensors} == expected
    assert {n for n in names if f"blocks.0.{n}" not in state.tensors} == expected


def test_layer_norms_are_kept_apart_too(make_task: Tasks) -> None:
    method = NeFL(make_task("vit", {"depth": 2}), NeFL.Options(scaling="depth", shares=(0.5, 1.0)))
    state = method.setup()
    small = method.nest[0]
    assert small.blocks == (0,)
    assert f"blocks.0.norm1.weight@{small.label}" in state.tensors
    assert f"blocks.0.branch2.size@{small.label}" in state.tensors
    assert "blocks.0.attention.query.weight" in state.tensors


# ---- submodels


SHARES = {  # As published, products of gamma_W and gamma_D
    ("resnet18", "width"): (0.2, 0.4, 0.6, 0.8, 1),
    ("resnet18", "depth"): (0.20, 0.39, 0.57, 0.81, 1),
    ("resnet18", "both"): (0.34 * 0.58, 0.4, 0.6, 0.8, 1),
    ("resnet34", "depth"): (0.23, 0.39, 0.61, 0.81, 1),
    ("resnet34", "both"): (0.378 * 0.53, 0.625 * 0.64, 0.771 * 0.78, 0.9 * 0.89, 1),
}


@pytest.mark.parametrize(("model", "scaling"), SHARES)
def test_published_submodels_have_the_published_shares(model: str, scaling: Any) -> None:
    task = Task(ModelConfig(model), Recipe(norm="tracked"), (3, 32, 32), 10)
    method = NeFL(task, NeFL.Options(scaling=scaling, published=True))
    found = [method.submodels.share(submodel) for submodel in method.nest]
    if (model, scaling) == ("resnet18", "depth"):
        # The paper's 0.20 leaves out the projections that stay of the dropped stages.
        whole = sum(p.numel() for p in task.build().parameters())
        found[0] -= (64 * 128 + 2 * 128 + 256 * 512 + 2 * 512) / whole
    assert found == pytest.approx(SHARES[model, scaling], abs=0.01)


def test_submodels_are_found_from_bytes(make_task: Tasks) -> None:
    free = NeFL(resnet(make_task), NeFL.Options())
    whole = free.peak(free.main)
    budgets = (whole // 8, whole // 2, whole, None)
    method = NeFL(replace(free.task, budgets=budgets), NeFL.Options())
    state, peaks = method.setup(), [method.peak(submodel) for submodel in method.nest]
    assert method.nest[-1] == method.main
    assert method.nest[-1].label == "full"
    assert len(peaks) == 3
    for budget, peak in zip(budgets, peaks, strict=False):
        assert budget is not None
        assert 0.7 * budget < peak <= budget
    assert [submodel.label for submodel in method.sizes(state)] == [p.label for p in method.nest]
    with pytest.raises(BudgetTooSmall, match="one training step of any submodel needs"):
        method.plan(state, Device(0, "a", 1000), 0)


@pytest.mark.parametrize("scaling", ["width", "depth", "both"])
def test_no_device_needs_more_than_it_has(
    make_task: Tasks, dataset: Dataset, partition: Partition, scaling: Any
) -> None:
    free = NeFL(resnet(make_task, momentum=0.9), NeFL.Options())
    whole = free.peak(free.main)
    task = replace(free.task, budgets=(int(0.6 * whole), whole), ratios=(0.5, 1.0), enforce=True)
    runner = DeviceRunner(NeFL(task, NeFL.Options(scaling=scaling)), dataset, partition)
    state = runner.method.setup()
    for round_index in range(2):
        state, updates = do_round(runner, state, round_index)
        for update in updates:
            assert update.plan.budget is not None
            assert update.plan.predicted <= update.plan.budget  # type: ignore[operator]
            if update.steps > 1:  # Momentum is there from the second step on.
                assert update.peak_bytes == update.plan.predicted
    assert any(update.plan.submodel != runner.method.main for update in updates)


def test_a_device_draws_within_its_reach(make_task: Tasks) -> None:
    widths = (0.25, 0.5, 0.75, 1.0)
    method = NeFL(make_task("mlp"), NeFL.Options(scaling="width", widths=widths, reach=1))
    state = method.setup()
    peaks = [method.peak(submodel) for submodel in method.nest]

    def drawn(memory: int | None) -> set[float]:
        device = Device(0, "a", memory)
        plans = (method.plan(state, device, round_index) for round_index in range(40))
        return {plan.submodel.width for plan in plans}

    assert method.plan_upper_bound(state, Device(0, "a", peaks[1]), 0).submodel.width == 0.5
    assert drawn(None) == {0.75, 1.0}
    assert drawn(peaks[1]) == {0.25, 0.5}
    assert drawn(peaks[0]) == {0.25}


def test_by_ratio_devices_also_draw_above_their_tier(make_task: Tasks) -> None:
    ratios = (0.2, 0.4, 0.6, 0.8, 1.0)
    task = replace(make_task("mlp"), ratios=ratios)
    method = NeFL(task, NeFL.Options(scaling="width", assign="ratio"))
    state = method.setup()
    assert method.options.ignores_budgets
    assert [p.width for p in method.nest] == [math.sqrt(r) for r in ratios]

    def tiers(ratio: float) -> set[int]:
        device = Device(0, "a", 1, ratio=ratio)
        plans = (method.plan(state, device, round_index) for round_index in range(60))
        return {method.nest.index(plan.submodel) for plan in plans}

    assert tiers(0.2) == {0, 1, 2}
    assert tiers(0.6) == {0, 1, 2, 3, 4}
    assert tiers(1.0) == {2, 3, 4}


def test_with_few_ratios_the_largest_submodel_is_trained_as_well(make_task: Tasks) -> None:
    task = replace(make_task("mlp"), ratios=(0.5, 1.0))
    options = NeFL.Options(widths=(0.2, 0.4, 0.6, 0.8, 1.0), assign="ratio", reach=0)
    method = NeFL(task, options)
    state = method.setup()
    plans = [method.plan(state, Device(0, "a", 1, ratio=ratio), 0) for ratio in (0.5, 1.0)]
    assert [method.nest.index(plan.submodel) for plan in plans] == [2, 4]


def test_a_refusal_names_the_smallest_submodel_that_could_be(make_task: Tasks) -> None:
    free = NeFL(make_task("mlp"), NeFL.Options(scaling="width"))
    method = NeFL(
        replace(free.task, budgets=(100, free.peak(free.main))), NeFL.Options(scaling="width")
    )
    with pytest.raises(BudgetTooSmall) as caught:
        method.plan(method.setup(), Device(0, "a", 100), 0)
    again = NeFL(replace(free.task, budgets=(caught.value.needed,)), NeFL.Options(scaling="width"))
    assert again.plan(again.setup(), Device(0, "a", caught.value.needed), 0)
    assert caught.value.needed < 0.5 * free.peak(free.main)


def test_listed_submodels_are_sorted(make_task: Tasks) -> None:
    method = NeFL(make_task("mlp"), NeFL.Options(widths=(1.0, 0.5)))
    assert [submodel.width for submodel in method.nest] == [0.5, 1.0]


class Tied(Staged):
    """Two blocks that share their weights."""

    def __init__(self, classes: int) -> None:
        blocks = [nn.Linear(16, 16), nn.Linear(16, 16)]
        blocks[1].weight = blocks[0].weight
        super().__init__(nn.Flatten(), blocks, nn.Linear(16, classes))


def test_a_tied_weight_is_the_same_without_its_first_block(make_task: Tasks) -> None:
    task = replace(make_task(), model=ModelConfig(f"{__name__}:Tied"))
    method = NeFL(task, NeFL.Options(blocks=((1,), (0, 1))))
    state = method.setup()
    assert "blocks.1.weight" not in state.tensors
    assert method.submodels.view(method.nest[0])["blocks.1.weight"].name == "blocks.0.weight"


def test_absorbing_steps_are_no_parameters(make_task: Tasks) -> None:
    options = NeFL.Options(blocks=((0, 3, 4), (0, 1, 2, 3, 4, 5)), steps="absorb")
    method = NeFL(resnet(make_task), options)
    sizes = [
        float(part.size)
        for part in method.submodels.build(method.nest[0]).modules()
        if type(part).__name__ == "StepSize"
    ]
    assert sizes == [3, 1, 2]
    assert not any("branch" in name for name in method.setup().tensors)
    learning = NeFL(method.task, replace(options, steps="absorb_learn"))
    starts = learning.setup().tensors
    small, full = (submodel.label for submodel in learning.nest)
    assert starts[f"blocks.0.branch.size@{small}"] == 3
    assert starts[f"blocks.0.branch.size@{full}"] == 1


def test_every_submodel_is_deployed_and_is_what_devices_trained(make_task: Tasks) -> None:
    method = NeFL(resnet(make_task), NeFL.Options(**FAMILY))
    state = method.setup()
    assert len(method.deploy(state)) == 3
    for submodel, model in zip(method.nest, method.deploy(state).values(), strict=True):
        module = model.fill()
        wanted = cut(state.tensors, method.submodels.view(submodel))
        for name, tensor in own_tensors(module).items():
            assert torch.equal(tensor, wanted[name])


# ---- pre-trained weights


def test_it_starts_from_a_state_dict_with_fresh_norms_for_submodels(
    make_task: Tasks, tmp_path: Any
) -> None:
    task = resnet(make_task, "resnet8")
    trained = task.build()
    with torch.no_grad():
        for tensor in trained.parameters():
            tensor.fill_(0.5)
    weights = {n: t for n, t in trained.state_dict().items() if not n.startswith("head.")}
    weights["head.linear.weight"] = torch.zeros(7, 64)
    save_file(weights, tmp_path / "weights.safetensors")
    chosen = replace(task.model, weights=str(tmp_path / "weights.safetensors"))
    method = NeFL(replace(task, model=chosen), NeFL.Options(widths=(0.5, 1.0)))
    state = method.setup().tensors
    assert torch.all(state["blocks.0.conv1.weight"] == 0.5)
    assert torch.all(state["blocks.0.norm1.weight@full"] == 0.5)
    assert torch.all(state[f"blocks.0.norm1.weight@{method.nest[0].label}"] == 1)
    assert torch.equal(state["head.linear.weight"], task.build().state_dict()["head.linear.weight"])


def test_what_is_kept_apart_by_name_starts_from_the_file(make_task: Tasks, tmp_path: Any) -> None:
    task = make_task("vit", {"dim": 8, "heads": 2, "depth": 1})
    weights = {name: torch.full_like(t, 7) for name, t in task.build().state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    chosen = replace(task.model, weights=str(tmp_path / "weights.safetensors"))
    options = NeFL.Options(widths=(0.5, 1.0), apart=("norms", "*.attention.*"))
    method = NeFL(replace(task, model=chosen), options)
    state, small = method.setup().tensors, method.nest[0].label
    assert torch.all(state[f"blocks.0.attention.query.weight@{small}"] == 7)
    assert state[f"blocks.0.attention.query.weight@{small}"].shape == (4, 4)
    assert torch.all(state[f"blocks.0.norm1.weight@{small}"] == 1)


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": (0.5,), "published": True}, "choose one of the three"),
        ({"shares": (0.5,), "widths": (0.5,)}, "choose one of the three"),
        ({"widths": (0.5, 1.0), "blocks": ((0,),)}, "2 and 1 came"),
        ({"shares": (0.0,)}, "method.shares must all be above 0"),
        ({"widths": (1.5,)}, "method.widths must all be above 0"),
        ({"reach": -1}, "method.reach must not be negative"),
        ({"steps": "absorb_learn", "apart": ("norms",)}, "add 'steps' to method.apart"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NeFL.Options(**options)


def test_all_blocks_at_full_width_are_the_model(make_task: Tasks) -> None:
    method = NeFL(resnet(make_task, "resnet8"), NeFL.Options(blocks=((0,), (2, 1, 0))))
    assert method.nest[1] == method.main
    assert method.nest[1].label == "full"


def test_unknown_blocks_and_names_are_refused(make_task: Tasks) -> None:
    task = resnet(make_task, "resnet8")
    with pytest.raises(ConfigError, match="blocks 0 to 2, not \\[3\\]"):
        NeFL(task, NeFL.Options(blocks=((3,),))).setup()
    with pytest.raises(ConfigError, match="no tensor is called like 'nothing'"):
        NeFL(task, NeFL.Options(apart=("nothing",))).setup()


def test_a_model_without_blocks_can_still_be_narrower(make_task: Tasks) -> None:
    method = NeFL(make_task("linear"), NeFL.Options())
    assert method.nest == (method.main,)
    with pytest.raises((ConfigError, ModelError)):
        NeFL(make_task("linear"), NeFL.Options(blocks=((0,),))).setup()


def test_dropped_blocks_save_time_and_memory_in_proportion(make_task: Tasks) -> None:
    """FLOPs stand for time here; benchmarks/nefl.py has the seconds."""
    method = NeFL(resnet(make_task), NeFL.Options(**FAMILY))
    stage = method.task.stage(0)
    blocks = NeFL(resnet(make_task), NeFL.Options(blocks=((0, 2, 4), (0, 1, 2, 3, 4, 5))))
    flops = [blocks.flops_per_sample(submodel, stage) for submodel in blocks.nest]
    assert 0.35 < flops[0] / flops[1] < 0.6
    assert method.peak(method.nest[0]) < method.peak(method.nest[1])
    assert isinstance(method.submodels.build(method.nest[0]).get_submodule("blocks.1"), nn.Identity)
