from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sizewise.data.augment import Transform
from sizewise.data.dataset import Dataset
from sizewise.exchange.plan import TrainingStage
from sizewise.steps.recipe import Recipe
from sizewise.training.loop import Shard, fit, freeze, learns, own_tensors
from sizewise.training.task import Task
from sizewise.training.working import WorkingCopy

TRANSFORM = Transform("none", (0.0,), (1.0,))
PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "batch": 100}


def shard_of(rows: int) -> Shard:
    """Image i is black but for the value i, so that a batch tells which rows it holds."""
    images = torch.zeros(rows, 1, 1, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(rows)
    return Shard(images, torch.arange(rows) % 2, torch.arange(rows), TRANSFORM)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))


# ---- batches


@given(st.integers(1, 30), st.integers(1, 12), st.booleans())
def test_pass_gives_every_row_once_but_for_the_rest(rows: int, size: int, drop: bool) -> None:
    batches = list(shard_of(rows).batches(size, generator(), drop_last=drop))
    seen = [round(v * 255) for images, _ in batches for v in images[:, 0, 0, 0].tolist()]
    assert len(seen) == len(set(seen))
    rest = rows % size
    lost = rest if drop or (rest == 1 and rows > 1) else 0
    assert len(seen) == rows - lost
    assert all(len(labels) == size for _, labels in batches[:-1])
    for images, labels in batches:
        assert labels.tolist() == [round(v * 255) % 2 for v in images[:, 0, 0, 0].tolist()]


def test_shard_is_only_its_own_rows() -> None:
    everything = shard_of(10)
    shard = Shard(everything.inputs, everything.labels, torch.tensor([7, 2, 5]), TRANSFORM)
    ((images, labels),) = shard.batches(8, generator())
    assert len(shard) == 3
    assert sorted(round(v * 255) for v in images[:, 0, 0, 0].tolist()) == [2, 5, 7]
    assert sorted(labels.tolist()) == [0, 1, 1]


def test_order_comes_from_the_generator_alone() -> None:
    def order(seed: int) -> list[float]:
        batches = shard_of(20).batches(6, generator(seed))
        return [value for images, _ in batches for value in images[:, 0, 0, 0].tolist()]

    assert order(1) == order(1)
    assert order(1) != order(2)


# ---- one step and many


def test_sgd_step_by_hand() -> None:
    model, shard = network(), shard_of(6)
    stage = TrainingStage(lr=0.5, epochs=1)
    before = [p.detach().clone().requires_grad_() for p in model.parameters()]
    images, labels = shard.transform(shard.inputs, None), shard.labels
    hidden = F.relu(F.linear(images.flatten(1), before[0], before[1]))
    loss = F.cross_entropy(F.linear(hidden, before[2], before[3]), labels)
    gradients = torch.autograd.grad(loss, before)
    result = fit(model, stage, shard, Recipe(**PLAIN), generator())
    assert (result.steps, result.loss_sum) == (1, pytest.approx(loss.item()))
    for after, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(after.detach(), old.detach() - 0.5 * gradient)


def test_proximal_pull_by_hand() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    nn.init.constant_(model[1].weight, 2.0)

    def sum_of_weights(module: nn.Module, images: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return module[1].weight.sum()

    recipe, stage = Recipe(**PLAIN, proximal=0.5), TrainingStage(lr=0.1, epochs=3)
    fit(model, stage, shard_of(4), recipe, generator(), loss=sum_of_weights)
    # The gradient is 1 + 0.5 (w - 2): w = 1.9, then 1.805, then 1.71475.
    torch.testing.assert_close(model[1].weight.detach(), torch.full((2, 2), 1.71475))


def test_clipping_bounds_the_whole_gradient() -> None:
    steps = {}
    for clip in (None, 1e-3):
        model = network()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        fit(model, TrainingStage(1.0, 1), shard_of(6), Recipe(**PLAIN, clip=clip), generator())
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        steps[clip] = after - before
    assert steps[None].norm() > 2e-3
    torch.testing.assert_close(steps[1e-3].norm().item(), 1e-3, rtol=1e-3, atol=0)
    torch.testing.assert_close(F.normalize(steps[None], dim=0), F.normalize(steps[1e-3], dim=0))


@pytest.mark.parametrize(
    ("epochs", "options", "steps"),
    [
        (1, {}, 3),
        (3, {}, 9),
        (3, {"max_steps": 4}, 4),
        (2, {"drop_last": True}, 4),
        (1, {"max_steps": 99}, 3),
    ],
)
def test_number_of_steps(epochs: int, options: dict[str, int], steps: int) -> None:
    recipe = Recipe(batch=4, **options)
    assert (
        fit(network(), TrainingStage(0.1, epochs), shard_of(10), recipe, generator()).steps == steps
    )


def test_each_epoch_is_shuffled_anew() -> None:
    seen: list[list[float]] = []

    def noting(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(images[:, 0, 0, 0].tolist())
        return F.cross_entropy(module(images), labels)

    fit(network(), TrainingStage(0.1, 2), shard_of(12), Recipe(batch=12), generator(), loss=noting)
    assert sorted(seen[0]) == sorted(seen[1])
    assert seen[0] != seen[1]


# ---- freezing


@pytest.mark.parametrize(
    ("name", "trainable", "expected"),
    [
        ("blocks.1.weight", None, True),
        ("blocks.1.weight", ("blocks.1",), True),
        ("blocks.1.weight", ("blocks",), True),
        ("blocks.1.weight", ("blocks.1.weight",), True),
        ("blocks.10.weight", ("blocks.1",), False),
        ("head.weight", ("blocks", "stem"), False),
        ("head.weight", (), False),
    ],
)
def test_names_learn_by_whole_parts(
    name: str, trainable: tuple[str, ...] | None, expected: bool
) -> None:
    assert learns(name, trainable) is expected


def test_freezing_returns_what_learns() -> None:
    model = network()
    assert freeze(model, ("3",)) == [model[3].weight, model[3].bias]
    assert not model[1].weight.requires_grad
    assert len(freeze(model, None)) == 4
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_frozen_tensors_keep_their_bits(
    optimizer: str, make_task: Callable[..., Task], dataset: Dataset
) -> None:
    # With momentum and weight decay on, also when trained earlier in the round.
    task = make_task("cnn", weight_decay=0.1, momentum=0.9, optimizer=optimizer)
    model = task.build()
    rows = torch.arange(12)
    shard = Shard(dataset.train_inputs, dataset.train_labels, rows, TRANSFORM)

    def states() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    start = states()
    fit(model, TrainingStage(0.1, 2, ("blocks.0",)), shard, task.recipe, generator())
    middle = states()
    fit(model, TrainingStage(0.1, 2, ("head",)), shard, task.recipe, generator())
    end = states()
    for name in start:
        assert torch.equal(start[name], middle[name]) == (not name.startswith("blocks.0."))
        assert torch.equal(middle[name], end[name]) == (not name.startswith("head."))


def test_frozen_parameters_get_no_gradient_left_from_earlier() -> None:
    model, shard = network(), shard_of(6)
    fit(model, TrainingStage(0.1, 1), shard, Recipe(**PLAIN), generator())
    frozen = model[1].weight.detach().clone()
    fit(model, TrainingStage(0.1, 1, ("3",)), shard, Recipe(batch=100), generator())
    assert torch.equal(model[1].weight, frozen)


# ---- packing up


class Parts(nn.Module):
    """Two norms beside parameters, a norm without any, and a buffer at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(2)
        self.second = nn.BatchNorm1d(2)
        self.bare = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("scale", torch.ones(1))


def test_only_what_learned_is_packed_with_the_buffers_beside_it() -> None:
    names = set(WorkingCopy(Parts()).trained([TrainingStage(0.1, 1, ("second",))]))
    buffers = {"running_mean", "running_var", "num_batches_tracked"}
    assert names == {f"second.{name}" for name in {"weight", "bias"} | buffers}


def test_stages_are_packed_together() -> None:
    stages = [TrainingStage(0.1, 1, ("first.weight",)), TrainingStage(0.1, 1, ("second.bias",))]
    names = set(WorkingCopy(Parts()).trained(stages))
    assert {"first.weight", "second.bias", "first.running_mean"} <= names
    assert not {"first.bias", "second.weight"} & names


def test_stage_that_trains_everything_packs_everything() -> None:
    model = Parts()
    assert set(WorkingCopy(model).trained([TrainingStage(0.1, 1)])) == set(model.state_dict())
    assert "bare.running_mean" in WorkingCopy(model).trained(
        [TrainingStage(0.1, 1, ("bare", "first"))]
    )


def test_packed_tensors_are_copies() -> None:
    model = network()
    packed = WorkingCopy(model).trained([TrainingStage(0.1, 1)])
    with torch.no_grad():
        model[1].weight.zero_()
    assert packed["1.weight"].abs().sum() > 0
    assert not packed["1.weight"].requires_grad


def test_tied_tensors_count_once_under_their_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert list(own_tensors(model)) == ["0.weight", "0.bias", "1.bias"]
