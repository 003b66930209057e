import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import devices_of, do_round
from sizewise.data.augment import Transform
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.errors import BudgetTooSmall, ConfigError, ModelError
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut, grid, size_in_bytes
from sizewise.families.nested import Nested
from sizewise.families.widthwise import Widths
from sizewise.fleet.devices import Device
from sizewise.methods.heterofl import HeteroFL, classifier, owned
from sizewise.steps.step import backpropagate
from sizewise.surgery import norms
from sizewise.training import evaluation
from sizewise.training.loop import Shard
from sizewise.training.task import Task

Tasks = Callable[..., Task]
Run = Callable[..., State]


def options(**chosen: Any) -> HeteroFL.Options:
    return HeteroFL.Options(**chosen)


# ---- widths


def test_devices_train_the_widest_that_they_hold(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.25, 0.5, 1))
    method = HeteroFL(task, options(widths=(1, 0.5, 0.25, 0.125)))
    state = method.setup()
    assert state.facts(Widths) == Widths((0.25, 0.5, 1))
    for device, size in zip(devices_of(task), ("width 0.25", "width 0.5", "full"), strict=True):
        plan = method.plan(state, device, 0)
        assert plan.submodel.label == size
        assert plan.predicted == plan.budget == device.memory
    poorer = replace(devices_of(task)[1], memory=task.budgets[1] - 1)  # type: ignore[operator]
    assert method.plan(state, poorer, 0).submodel.label == "width 0.25"
    nothing = Device(0, "tiny", 100)
    with pytest.raises(BudgetTooSmall, match=r"training at width 0\.125 needs"):
        method.plan(state, nothing, 0)


# ---- dynamic levels


def drawn(method: HeteroFL, device: Device, rounds: int = 1500) -> Counter[float]:
    return Counter(method.width(device, round_index) for round_index in range(rounds))


def test_levels_are_drawn_in_their_proportions(make_task: Tasks) -> None:
    chosen = options(widths=(1, 0.5, 0.25), levels="dynamic", proportions=(1, 2, 7))
    counts = drawn(HeteroFL(make_task(), chosen), Device(0, "any"))
    for width, share in ((1, 0.1), (0.5, 0.2), (0.25, 0.7)):
        assert counts[width] / 1500 == pytest.approx(share, abs=0.04)


def test_levels_are_equally_likely_by_default(make_task: Tasks) -> None:
    method = HeteroFL(make_task(), options(widths=(0.25, 0.5, 1), levels="dynamic"))
    counts = drawn(method, Device(0, "any"))
    assert all(count / 1500 == pytest.approx(1 / 3, abs=0.04) for count in counts.values())


def test_levels_that_do_not_fit_are_never_drawn(make_task: Tasks) -> None:
    task = make_task(shares=(0.5, 1))
    chosen = options(widths=(1, 0.5, 0.25), levels="dynamic", proportions=(8, 1, 3))
    counts = drawn(HeteroFL(task, chosen), devices_of(task)[0])
    assert counts.keys() == {0.25, 0.5}
    assert counts[0.25] / 1500 == pytest.approx(0.75, abs=0.04)


def test_a_preview_shows_the_largest_level(make_task: Tasks) -> None:
    task = make_task(shares=(0.5, 1))
    method = HeteroFL(task, options(widths=(1, 0.5, 0.25), levels="dynamic"))
    state, device = method.setup(), devices_of(task)[0]
    plans = [method.plan_upper_bound(state, device, round_index) for round_index in range(9)]
    assert {plan.submodel.width for plan in plans} == {0.5}


def test_levels_depend_on_seed_round_and_device_alone(make_task: Tasks) -> None:
    chosen = options(widths=(0.25, 0.5, 1), levels="dynamic")

    def levels(seed: int, device: int) -> list[float]:
        method = HeteroFL(make_task(seed=seed), chosen)
        return [method.width(Device(device, "any"), r) for r in reversed(range(20))]

    assert levels(0, 0) == levels(0, 0)
    assert len({tuple(levels(*key)) for key in ((0, 0), (1, 0), (0, 1))}) == 3


def test_levels_by_ratio_need_no_widths(make_task: Tasks) -> None:
    task = make_task(shares=(0.25, 0.5, 1))
    method = HeteroFL(task, options(levels="dynamic", assign="ratio", widths=(0.5, 1)))
    assert drawn(method, devices_of(task)[0], 20).keys() == {0.25}
    assert drawn(method, devices_of(task)[2], 50).keys() == {0.25, 0.5, 1}


def test_proportions_of_unknown_ratios_are_refused(make_task: Tasks) -> None:
    chosen = options(levels="dynamic", assign="ratio", widths=(0.5, 1), proportions=(1, 1))
    with pytest.raises(ConfigError, match=r"proportions need the ratios .*; add \[0\.25\]"):
        HeteroFL(make_task(shares=(0.25, 0.5, 1)), chosen)


# ---- the scaler


@pytest.mark.parametrize("place", ["norm", "conv"])
def test_scaler_divides_in_training_and_not_in_evaluation(place: str, make_task: Tasks) -> None:
    model, args = ("vit", {"dim": 8, "depth": 1, "heads": 2, "patch": 2})
    plain = HeteroFL(make_task(model, args))
    scaled = HeteroFL(make_task(model, args), options(scaler=place))
    state, images = plain.setup(), torch.randn(5, 1, 4, 4)
    for method in (plain, scaled):
        assert method.setup().tensors.keys() == state.tensors.keys()
    for width in (0.5, 1.0):
        left, right = (m.submodels.filled(m.narrow(width), state) for m in (plain, scaled))
        assert torch.equal(left.train()(images), right.train()(images)) == (width == 1)
        assert torch.equal(left.eval()(images), right.eval()(images))


def test_scaler_changes_a_run_no_more_than_epsilon_under_batch_norm(
    make_task: Tasks, federate: Run
) -> None:
    task = make_task("cnn", {"layers": [8, 8]}, shares=(0.5, 1))
    plain, scaled = (federate(HeteroFL(task, options(scaler=s)), 1) for s in ("none", "norm"))
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(scaled.tensors[name], tensor, rtol=1e-3, atol=1e-4)
    assert any(not torch.equal(scaled.tensors[n], t) for n, t in plain.tensors.items())


# ---- label masking


@pytest.fixture
def by_class(dataset: Dataset) -> Partition:
    """Device 0 has classes 0 and 1, device 1 has class 1 only, device 2 class 1 as well."""
    rows = [torch.nonzero(dataset.train_labels == label).flatten() for label in (0, 1)]
    parts = [torch.cat([rows[0], rows[1][:4]]), rows[1][4:8], rows[1][8:]]
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    return Partition(torch.cat(parts), ends)


def test_only_rows_that_a_device_owns_are_sent_merged_and_counted(
    make_task: Tasks, dataset: Dataset, by_class: Partition
) -> None:
    method = HeteroFL(make_task(shares=(0.5, 1)), options(mask_labels=True))
    assert method.discloses == {"weights", "labels"}
    runner, state = DeviceRunner(method, dataset, by_class), method.setup()
    merged, updates = do_round(runner, state, 0)
    for update, rows in zip(updates, ([0, 1], [1], [1]), strict=True):
        assert update.rows == {"head.weight": rows, "head.bias": rows}
    assert [update.plan.submodel.label for update in updates] == ["width 0.5", "full", "full"]
    assert [tuple(u.tensors["head.weight"].shape) for u in updates] == [(2, 3), (1, 5), (1, 5)]
    full = size_in_bytes(cut(state.tensors, method.submodels.view(updates[1].plan.submodel)))
    assert size_in_bytes(updates[1].tensors) == full - 4 * 2 * (5 + 1)

    weight, samples = state.tensors["head.weight"].clone(), (14, 4, 2)
    sent = [update.tensors["head.weight"] for update in updates]
    weight[0, :3] = sent[0][0]
    weight[1, :3] = (
        sum(n * tensor[-1, :3] for n, tensor in zip(samples, sent, strict=True)) / 20  # type: ignore[assignment]
    )
    weight[1, 3:] = (4 * sent[1][0, 3:] + 2 * sent[2][0, 3:]) / 6
    torch.testing.assert_close(merged.tensors["head.weight"], weight)
    assert torch.equal(merged.tensors["head.weight"][2], weight[2]), "nobody owns class 2"


def test_masked_loss_gives_absent_classes_no_gradient(make_task: Tasks, dataset: Dataset) -> None:
    method = HeteroFL(make_task(), options(mask_labels=True))
    shard = shard_of(dataset, torch.tensor([0, 1, 3, 4]))  # Classes 0 and 1.
    assert owned(shard).tolist() == [0, 1]
    module = method.submodels.build(method.main)
    images = torch.randn(2, 1, 4, 4)
    # Class 1 is not in this batch, but it is the device's own.
    backpropagate(
        method.loss(method.main, method.task.stage(), shard)(module, images, torch.zeros(2).long())
    )
    gradient = module.get_parameter("head.bias").grad
    assert gradient is not None
    assert (gradient != 0).tolist() == [True, True, False]


def shard_of(dataset: Dataset, rows: Tensor) -> Shard:
    transform = Transform("none", dataset.mean, dataset.std)
    return Shard(dataset.train_inputs, dataset.train_labels, rows, transform)


def test_classifier_is_the_last_layer_with_a_row_for_each_class() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, bias=False), nn.ReLU())
    assert classifier(model, 3) == ["1.weight"]
    with pytest.raises(
        ModelError, match=r"no linear layer with 7 outputs.*turn method.mask_labels off"
    ):
        classifier(model, 7)


def test_without_a_mask_nothing_is_left_out(
    make_task: Tasks, dataset: Dataset, by_class: Partition
) -> None:
    method = HeteroFL(make_task())
    assert method.discloses == {"weights"}
    _, updates = do_round(DeviceRunner(method, dataset, by_class), method.setup(), 0)
    assert all(update.rows == {} for update in updates)


# ---- slimmable


def by_hand(tensors: dict[str, Tensor], units: tuple[int, int], images: Tensor) -> Tensor:
    """The logits of a perceptron's first units."""
    one, two = units
    x = images.flatten(1)
    x = F.linear(x, tensors["stem.linear.weight"][:one], tensors["stem.linear.bias"][:one]).relu()
    weight = tensors["blocks.0.linear.weight"][:two, :one]
    x = F.linear(x, weight, tensors["blocks.0.linear.bias"][:two]).relu()
    return F.linear(x, tensors["head.weight"][:, :two], tensors["head.bias"])


def test_slimmable_gradient_is_the_sum_over_widths_by_hand(make_task: Tasks) -> None:
    method = HeteroFL(make_task(), options(slimmable=True, widths=(0.25, 0.5, 1)))
    state, images, labels = method.setup(), torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 1])
    module = method.submodels.filled(method.trainee(1.0), state)
    value = backpropagate(
        method.loss(method.main, method.task.stage(), None)(module, images, labels)
    )
    tensors = {name: t.clone().requires_grad_() for name, t in state.tensors.items()}
    units = [(2, 2), (3, 3), (6, 5)]  # Of 6 and 5, rounded up.
    total = torch.stack([F.cross_entropy(by_hand(tensors, u, images), labels) for u in units]).sum()
    total.backward()
    torch.testing.assert_close(value, total.detach())
    for name, tensor in tensors.items():
        torch.testing.assert_close(module.get_parameter(f"widest.{name}").grad, tensor.grad)


@pytest.mark.parametrize("scaler", ["none", "norm", "conv"])
def test_slimmable_gradient_is_the_sum_over_models_that_are_cut(
    scaler: str, make_task: Tasks
) -> None:
    chosen = options(slimmable=True, widths=(0.25, 0.5, 1), scaler=scaler)
    method = HeteroFL(make_task("preresnet8"), chosen)
    state, images, labels = method.setup(), torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 1])
    module = method.submodels.filled(method.trainee(1.0), state).train()
    backpropagate(method.loss(method.main, method.task.stage(), None)(module, images, labels))
    expected = {n: torch.zeros_like(p) for n, p in module.widest.named_parameters()}  # type: ignore[union-attr]
    single = HeteroFL(make_task("preresnet8"), options(scaler=scaler))
    for submodel in map(single.narrow, (0.25, 0.5, 1.0)):
        alone, view = (
            single.submodels.filled(submodel, state).train(),
            single.submodels.view(submodel),
        )
        alone.zero_grad()
        F.cross_entropy(alone(images), labels).backward()
        for name, parameter in alone.named_parameters():
            index = view[name].index
            place = ... if index is None else grid(index, expected[name].shape)
            expected[name][place] += parameter.grad
    for name, gradient in expected.items():
        found = module.get_parameter(f"widest.{name}").grad
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["batch", "per_width_stats", "per_submodel"])
def test_slimmable_devices_train_and_deploy_all_widths_up_to_theirs(
    norm: str, make_task: Tasks, federate: Run, dataset: Dataset, partition: Partition
) -> None:
    chosen = options(slimmable=True, widths=(0.25, 0.5, 1), mask_labels=True)
    method = HeteroFL(make_task("cnn", norm=norm), chosen)
    state = federate(method, 1)
    assert list(method.deploy(state)) == ["width 0.25", "width 0.5", "full"]
    assert isinstance(method.submodels.module(method.trainee(1.0)), Nested)
    assert all(
        type(model.fill()) is type(method.task.build()) for model in method.deploy(state).values()
    )
    scores = LocalEngine(DeviceRunner(method, dataset, partition)).evaluate(state)
    assert len(scores) == 3
    if norm != "batch":
        start = method.setup().tensors
        for size in ("width 0.25", "width 0.5", "full"):
            name = f"stem.norm.running_mean@{size}"
            assert not torch.equal(state.tensors[name], start[name])


# ---- static batch norm


def test_static_batch_norm_works_on_narrow_submodels(
    make_task: Tasks, federate: Run, dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", {"layers": [8, 8]}, shares=(0.5, 1), norm="sbn", eval_batch=10)
    method = HeteroFL(task, options(scaler="norm"))
    state = federate(method, 1)
    scores = LocalEngine(DeviceRunner(method, dataset, partition)).evaluate(state)
    assert list(scores) == ["width 0.5", "full"]
    transform = Transform("none", dataset.mean, dataset.std)
    for submodel in method.sizes(state):
        module = copy.deepcopy(method.submodels.filled(submodel, state)).eval()
        batches = [transform(images, None) for images in dataset.train_inputs.split(10)]
        first = module.get_submodule("stem.conv")
        means = torch.stack([first(batch).mean((0, 2, 3)) for batch in batches])
        norms.recalibrate(module, batches)
        found = module.get_buffer("stem.norm.running_mean")
        torch.testing.assert_close(found, means.mean(0).detach())
        expected = evaluation.total(evaluation.score(module, dataset, 10))
        assert scores[submodel.label] == expected


def test_update_of_a_device_is_its_narrow_submodel(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    task = make_task("cnn", {"layers": [8, 8]}, shares=(0.5, 1), epochs=2)
    method = HeteroFL(task)
    state = method.setup()
    update = DeviceRunner(method, dataset, partition).train(
        state, method.plan(state, devices_of(task)[0], 0)
    )
    assert isinstance(update, Update)
    assert tuple(update.tensors["blocks.0.conv.weight"].shape) == (4, 4, 3, 3)
    assert tuple(update.tensors["head.linear.weight"].shape) == (3, 4)
    assert update.peak_bytes == update.plan.predicted == task.budgets[0]
