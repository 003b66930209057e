from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import devices_of, do_round
from sizewise.common import rng
from sizewise.config import from_dict
from sizewise.data.augment import Transform
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut, grid
from sizewise.families.nested import Nested
from sizewise.fleet.devices import Device
from sizewise.methods.fjord import FjORD
from sizewise.steps.step import backpropagate
from sizewise.training.loop import Shard
from sizewise.training.task import Task

Tasks = Callable[..., Task]
WIDTHS = (0.25, 0.5, 1.0)


def fjord(task: Task, **options: Any) -> FjORD:
    return FjORD(task, FjORD.Options(**{"widths": WIDTHS, **options}))


def trained(method: FjORD, state: State, dataset: Dataset, partition: Partition) -> Update:
    runner = DeviceRunner(method, dataset, partition)
    update = runner.train(state, method.plan(state, Device(2, "any"), 0))
    assert isinstance(update, Update)
    return update


def by_cutting(
    method: FjORD, state: State, dataset: Dataset, partition: Partition
) -> tuple[dict[str, Tensor], list[float]]:
    """Train device 2 as the paper says: cut a model for each batch, step it, paste it back."""
    task, tensors = method.task, {name: t.clone() for name, t in state.tensors.items()}
    transform = Transform("none", dataset.mean, dataset.std)
    shard = Shard(dataset.train_inputs, dataset.train_labels, partition.shard(2), transform)
    batches = shard.batches(task.recipe.batch, rng.torch_generator(task.seed, "batches", 0, 2))
    drawn = []
    with rng.seeded(task.seed, "dropout", 0, 2):
        for images, labels in batches:
            width = WIDTHS[int(torch.randint(len(WIDTHS), ()))]
            drawn.append(width)
            submodel = method.narrow(width)
            module, view = method.submodels.build(submodel).train(), method.submodels.view(submodel)
            module.load_state_dict(cut(tensors, view))
            optimizer = torch.optim.SGD(module.parameters(), task.recipe.lr)
            F.cross_entropy(module(images), labels).backward()
            optimizer.step()
            for local, tensor in module.state_dict().items():
                slot = view[local]
                whole = tensors[slot.name]
                whole[... if slot.index is None else grid(slot.index, whole.shape)] = tensor
    return tensors, drawn


@pytest.mark.parametrize("model", ["mlp", "cnn", "preresnet8"])
def test_a_device_trains_as_if_each_batch_had_a_model_of_its_own(
    model: str, make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    # Momentum and decay would also move what a batch leaves out.
    task = make_task(model, momentum=0.0, weight_decay=0.0, norm="per_width_stats", batch=2, seed=4)
    method = fjord(task)
    state = method.setup()
    update = trained(method, state, dataset, partition)
    expected, drawn = by_cutting(method, state, dataset, partition)
    assert set(drawn) == set(WIDTHS)
    view = method.submodels.view(update.plan.submodel)
    assert view.keys() == update.tensors.keys()
    assert {slot.name for slot in view.values()} == state.tensors.keys()
    for local, slot in view.items():
        torch.testing.assert_close(update.tensors[local], expected[slot.name])


def test_one_narrow_step_leaves_the_rest_to_the_bit(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    for seed in range(20):
        task = make_task(weight_decay=0.0, max_steps=1, seed=seed)
        method = fjord(task)
        state = method.setup()
        _, drawn = by_cutting(method, state, dataset, partition)
        if drawn[0] == 0.5:
            break
    update = trained(method, state, dataset, partition)
    found = update.tensors["widest.blocks.0.linear.weight"]
    before = state.tensors["blocks.0.linear.weight"]
    outside = torch.ones(5, 6, dtype=torch.bool)
    outside[:3, :3] = False
    assert torch.equal(found[outside], before[outside])
    assert not torch.equal(update.tensors["widest.head.bias"], state.tensors["head.bias"])


# ---- distillation


@pytest.mark.parametrize("number", range(3))
def test_distillation_by_hand(number: int, make_task: Tasks, dataset: Dataset) -> None:
    method = fjord(make_task(), distil=True)
    state, images, labels = method.setup(), torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 1])
    module = method.submodels.filled(method.trainee(1.0), state)
    shard = Shard(dataset.train_inputs, labels, labels, Transform("none", (), ()))
    seed = next(s for s in range(99) if drawn_with(s) == number)
    torch.manual_seed(seed)
    value = backpropagate(
        method.loss(method.main, method.task.stage(), shard)(module, images, labels)
    )

    tensors = {name: t.clone().requires_grad_() for name, t in state.tensors.items()}
    first, second = [(2, 2), (3, 3), (6, 5)][number]
    x = images.flatten(1)

    def logits(one: int, two: int) -> tuple[Tensor, Tensor]:
        stem, block = tensors["stem.linear.weight"], tensors["blocks.0.linear.weight"]
        hidden = (x @ stem[:one].T + tensors["stem.linear.bias"][:one]).relu()
        hidden = (hidden @ block[:two, :one].T + tensors["blocks.0.linear.bias"][:two]).relu()
        return hidden, hidden @ tensors["head.weight"][:, :two].T + tensors["head.bias"]

    hidden, full = logits(6, 5)
    narrow, drawn = logits(first, second)
    teacher, truth = full.detach().softmax(1), F.one_hot(labels, 3)
    hard = -(truth * full.log_softmax(1)).sum(1).mean()
    soft = -(teacher * drawn.log_softmax(1)).sum(1).mean()
    (hard + soft).backward()
    torch.testing.assert_close(value, (hard + soft).detach())
    for name, tensor in tensors.items():
        torch.testing.assert_close(module.get_parameter(f"widest.{name}").grad, tensor.grad)
    # The gradient of a cross entropy is the difference of the probabilities. The teacher cancels
    # out where both networks read the same weight, as they do in the bias.
    bias = (drawn.softmax(1) - truth).sum(0) / 4
    torch.testing.assert_close(module.get_parameter("widest.head.bias").grad, bias.detach())
    weight = (full.softmax(1) - truth).T @ hidden / 4
    weight[:, :second] += (drawn.softmax(1) - teacher).T @ narrow / 4
    torch.testing.assert_close(module.get_parameter("widest.head.weight").grad, weight.detach())


def drawn_with(seed: int) -> int:
    torch.manual_seed(seed)
    return int(torch.randint(3, ()))


# ---- statistics


def test_statistics_are_kept_apart_for_each_width(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=WIDTHS, norm="per_width_stats", epochs=3)
    method = fjord(task, assign="ratio")
    state = method.setup()
    sizes = {"width 0.25": 2, "width 0.5": 4, "full": 8}
    for size, channels in sizes.items():
        assert state.tensors[f"stem.norm.running_mean@{size}"].shape == (channels,)
    assert "stem.norm.running_mean" not in state.tensors
    assert "stem.norm.weight" in state.tensors, "the affine part is shared"
    runner = DeviceRunner(method, dataset, partition)
    plans = [method.plan(state, device, 0) for device in devices_of(task)]
    for plan, moving in zip(plans, (1, 2, 3), strict=True):
        update = runner.train(state, plan)
        assert isinstance(update, Update)
        merged = method.merge(state, [update]).tensors
        names = [f"stem.norm.running_mean@{size}" for size in sizes]
        moved = [not torch.equal(merged[name], state.tensors[name]) for name in names]
        assert moved == [number < moving for number in range(3)]


def test_recipe_keeps_statistics_for_each_width() -> None:
    assert from_dict({"method": {"name": "fjord"}}).recipe.norm == "per_width_stats"


# ---- widths


def test_all_widths_up_to_the_largest_are_deployed(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.25, 0.5))
    method = fjord(task, widths=(0.125, 0.25, 0.5, 1.0), assign="bytes")
    sizes = list(method.deploy(method.setup()))
    assert sizes == ["width 0.125", "width 0.25", "width 0.5"]


def test_widths_of_batches_are_drawn_evenly(make_task: Tasks, dataset: Dataset) -> None:
    method = fjord(make_task())
    module = method.submodels.module(method.trainee(1.0))
    assert isinstance(module, Nested)
    seen = Counter[float]()
    run = module.forward

    def watched(x: Tensor, width: float | None = None) -> Tensor:
        seen[width or 1.0] += 1
        return run(x, width)

    module.forward = watched  # type: ignore[method-assign]
    labels = torch.tensor([0, 1])
    shard = Shard(dataset.train_inputs, labels, labels, Transform("none", (), ()))
    loss = method.loss(method.main, method.task.stage(), shard)
    for _ in range(300):
        list(loss(module, torch.randn(2, 1, 4, 4), labels))  # type: ignore[arg-type]
    assert seen.keys() == set(WIDTHS)
    assert all(70 < count < 130 for count in seen.values())


def test_width_of_a_round_is_drawn_once_up_to_what_fits(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.5, 1))
    method = fjord(task, draw="round")
    state = method.setup()
    weak, strong = devices_of(task)[:2]
    sizes = [[method.plan(state, d, r).submodel.label for r in range(60)] for d in (weak, strong)]
    assert set(sizes[0]) == {"width 0.25", "width 0.5"}
    assert set(sizes[1]) == {"width 0.25", "width 0.5", "full"}
    again = fjord(task, draw="round")
    assert sizes[1] == [again.plan(state, strong, r).submodel.label for r in range(60)]
    assert not isinstance(method.submodels.module(method.plan(state, strong, 0).submodel), Nested)


# ---- bytes


@pytest.mark.parametrize("distil", [False, True])
@pytest.mark.parametrize(
    ("model", "args"),
    [
        ("mlp", {"hidden": [60, 60]}),
        ("vit", {"depth": 1, "patch": 2}),
    ],
)
def test_no_width_needs_more_than_predicted(
    model: str, args: dict[str, Any], distil: bool, make_task: Tasks
) -> None:
    task = make_task(model, args, batch=8)
    method = fjord(task, distil=distil, widths=(0.8, 0.9, 1.0))
    state = method.setup()
    plan = method.plan(state, Device(0, "any"), 0)
    peaks = []
    for seed in range(4):
        shard = Shard(
            torch.randint(0, 256, (32, 1, 4, 4), dtype=torch.uint8),
            torch.randint(0, 3, (32,)),
            torch.arange(32),
            Transform("none", (0.5,), (0.5,)),
        )
        tensors = cut(state.tensors, method.submodels.view(plan.submodel))
        peaks.append(method.train(replace(plan, device=seed), tensors, shard, {}).peak_bytes)
    assert plan.predicted is not None
    assert max(peak or 0 for peak in peaks) == plan.predicted


def test_peaks_are_those_of_the_drawn_widths(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", {"layers": [4, 4]}, max_steps=1, batch=15)
    state = fjord(task).setup()

    def peaks(order: list[int]) -> dict[int, int | None]:
        method = fjord(task)
        runner = DeviceRunner(method, dataset, partition)
        plans = {r: method.plan(state, Device(2, "any"), r) for r in order}
        updates = {r: runner.train(state, plan) for r, plan in plans.items()}
        return {r: getattr(update, "peak_bytes", None) for r, update in updates.items()}

    found = peaks([0, 1, 2, 3, 4])
    assert found == peaks([4, 3, 2, 1, 0])
    assert len(set(found.values())) > 1


def test_flops_are_the_mean_over_the_drawn_widths(make_task: Tasks) -> None:
    plain, taught = fjord(make_task()), fjord(make_task(), distil=True)
    stage = plain.task.stage(0)
    single = [plain.flops_per_sample(plain.narrow(width), stage) for width in WIDTHS]
    mean = sum(single) // 3
    assert plain.flops_per_sample(plain.trainee(1.0), stage) == mean
    found = taught.flops_per_sample(taught.trainee(1.0), stage)
    assert abs(found - (single[-1] + mean)) <= 1


def test_headline_is_the_widest(make_task: Tasks, dataset: Dataset, partition: Partition) -> None:
    method = fjord(make_task())
    state, _ = do_round(DeviceRunner(method, dataset, partition), method.setup(), 0)
    assert method.summary_metric(dict.fromkeys(method.deploy(state), 0.1) | {"full": 0.7}) == 0.7
