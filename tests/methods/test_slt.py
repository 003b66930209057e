from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from sizewise.common import rng
from sizewise.data.augment import Transform
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.local import LocalEngine
from sizewise.errors import BudgetTooSmall, ConfigError
from sizewise.exchange.plan import Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, cut, size_in_bytes
from sizewise.fleet.devices import Device
from sizewise.methods.fedavg import FedAvg
from sizewise.methods.slt import SLT, Progress
from sizewise.methods.slt.configurations import configuration
from sizewise.steps.recipe import Recipe
from sizewise.training.loop import Shard
from sizewise.training.task import ModelConfig, Task

SHIPPED = {
    0.125: "1 1 1 1 3 4 5 12 12 17 17 25 25 44 51 64",
    0.25: "11 12 12 16 16 22 22 32 32 44 51 64",
    0.5: "30 32 35 40 43 53 60 64",
}
"""Channels of 64 in the heads of the public code's tables for ResNet-20."""

ENDS = [75, 116, 137, 225, 245, 398, 423, 779, 843, 1384, 1754, 2500]


def tiny(budgets: Sequence[int | None] = (None,), rounds: int = 8, **options: object) -> SLT:
    recipe = Recipe(lr=0.05, batch=32)
    task = Task(ModelConfig("resnet8"), recipe, (1, 8, 8), 3, 0, rounds, tuple(budgets))
    return SLT(task, SLT.Options(**options))  # type: ignore[arg-type]


@cache
def published(ratio: float) -> SLT:
    task = Task(ModelConfig("resnet20"), Recipe(), (3, 32, 32), 10, rounds=2500, ratios=(ratio,))
    return SLT(task, SLT.Options(assign="ratio"))


@pytest.fixture(scope="module")
def budget() -> int:
    """A little more than every step needs with the narrowest head."""
    method = tiny()
    steps = range(1, len(method.submodels.channels.groups) + 1)
    return int(1.2 * max(method.bytes_of(step, step - 1, 1 / 64) for step in steps))


@pytest.fixture(scope="module")
def shard() -> Shard:
    images = torch.randint(0, 256, (96, 1, 8, 8), dtype=torch.uint8)
    return Shard(images, torch.arange(96) % 3, torch.arange(96), Transform("none", (0.5,), (0.2,)))


def train(method: SLT, state: State, round_index: int, device: Device, shard: Shard) -> Update:
    plan = method.plan(state, device, round_index)
    return method.train(plan, cut(state.tensors, method.submodels.view(plan.submodel)), shard, {})


@pytest.mark.parametrize("ratio", SHIPPED)
def test_tables_have_the_published_steps(ratio: float) -> None:
    widths = published(ratio).table
    shipped = [int(channels) / 64 for channels in SHIPPED[ratio].split()]
    assert len(widths) == len(shipped) + 1
    assert widths[0] <= widths[1]
    assert widths == sorted(widths)
    assert widths[-1] == 1
    # The shipped ones are rounded by hand: they take 74 to 101 % of the budget.
    assert widths[1:] == pytest.approx(shipped, abs=0.13)
    budget = published(ratio).capacity(ratio)
    assert budget is not None
    for step, width in enumerate(shipped, 1):
        assert published(ratio).bytes_of(step, step - 1, width) < 1.02 * budget


def test_configurations_fit_the_papers_accounting() -> None:
    method = published(0.25)
    (limit,) = method.capacities()
    assert limit is not None
    for step, width in enumerate(method.table):
        assert method.bytes_of(step, max(step - 1, 0), width) <= limit


def test_switch_points_grow_with_the_parameters_that_are_added() -> None:
    method = SLT(published(0.25).task, SLT.Options(assign="ratio"))
    # With the public code's widths; a step ends at the share of all weights that are there by then.
    method.table = [0.185, *(int(channels) / 64 for channels in SHIPPED[0.25].split())]
    ends = method.ends()
    assert ends == sorted(ends)
    assert ends[1:] == pytest.approx(ENDS, rel=0.06)


def test_switch_points_of_the_public_code() -> None:
    task = published(0.25).task
    method = SLT(task, SLT.Options(assign="ratio", rounds="params_trainable"))
    shipped = (0.185, 0.19, 0.19, 0.25, 0.25, 0.35, 0.35, 0.5, 0.5, 0.7, 0.8, 1.0)
    method.table = [shipped[0], *shipped]
    # What it logs when it is run on its own table for 2,500 rounds.
    assert method.ends()[:5] == [462, 484, 516, 548, 600]


@pytest.mark.parametrize("rule", ["params_added", "params_trainable", "equal"])
def test_every_rule_ends_with_the_run(rule: str, budget: int) -> None:
    task = replace(tiny([budget]).task, rounds=40)
    method = SLT(task, SLT.Options(rounds=rule))  # type: ignore[arg-type]
    ends = method.ends()
    assert len(ends) == len(method.table)
    assert ends == sorted(ends)
    assert ends[-1] == 40
    state = method.setup()
    steps = [method.step(state, round_index) for round_index in range(40)]
    assert steps == sorted(steps)
    assert steps[-1] == len(method.table) - 1


@pytest.mark.parametrize("rule", ["params_added", "params_trainable", "equal"])
def test_no_layer_is_frozen_before_a_round_has_trained_it(rule: str) -> None:
    # By their sizes alone, the first two steps of both would have no round.
    for rounds, first in ((400, 1 / 64), (9, 0.9)):
        task = replace(tiny().task, rounds=rounds)
        method = SLT(task, SLT.Options(rounds=rule))  # type: ignore[arg-type]
        method.table = [first, first, *(max(first, n / 8) for n in range(2, 7)), 1.0]
        ends = method.ends()
        assert ends[-1] == rounds
        assert all(before < after for before, after in pairwise(ends))
        assert ends[0] >= 0
    method = SLT(replace(task, rounds=3), SLT.Options(rounds=rule))  # type: ignore[arg-type]
    method.table = [0.5] * 7 + [1.0]
    assert method.ends() == sorted(method.ends())


def test_an_unlimited_fleet_is_fedavg(
    make_task: Callable[..., Task], dataset: Dataset, partition: Partition
) -> None:
    def run(method: FedAvg | SLT) -> State:
        runner = DeviceRunner(method, dataset, partition)
        engine, state = LocalEngine(runner), method.setup()
        for r in range(2):
            plans = [method.plan(state, Device(device, "any"), r) for device in range(3)]
            state = method.merge(state, engine.train(state, plans))  # type: ignore[arg-type]
        return state

    ours, plain = run(SLT(make_task("cnn"))), run(FedAvg(make_task("cnn")))
    for name, tensor in plain.tensors.items():
        assert torch.equal(ours.tensors[name], tensor)


def test_predicted_is_metered_within_the_budget_in_every_step(budget: int, shard: Shard) -> None:
    method = tiny([budget, 2 * budget], rounds=30)
    state = method.setup()
    uploads = []
    for round_index in sorted({0, *(end for end in method.ends()[:-1])}):
        for memory in (budget, 2 * budget):
            update = train(method, state, round_index, Device(0, "a", memory), shard)
            assert update.peak_bytes == update.plan.predicted
            assert update.peak_bytes <= memory
        weak = train(method, state, round_index, Device(0, "a", budget), shard)
        whole = size_in_bytes(cut(state.tensors, method.submodels.view(weak.plan.submodel)))
        uploads.append(size_in_bytes(weak.tensors) / whole)
    # The share that is sent falls as layers freeze.
    assert uploads == sorted(uploads, reverse=True)
    assert uploads[-1] < 0.9


def test_frozen_layers_do_not_move_and_are_not_sent(budget: int, shard: Shard) -> None:
    method = tiny([budget], rounds=30)
    state = method.setup()
    last = len(method.table) - 1
    update = train(method, state, 29, Device(0, "a", budget), shard)
    frozen, channels = last - 1, method.submodels.channels
    names = [n for n, _ in method.submodels._parameters if (channels.layer(n) or 0) < frozen]
    names = [n for n in names if channels.layer(n) is not None]
    assert names
    assert not set(names) & set(update.tensors)
    merged = method.merge(state, [update])
    for name in names:
        assert torch.equal(merged.tensors[name], state.tensors[name])


def test_strong_devices_freeze_less_and_keep_the_heads_width(budget: int) -> None:
    method = tiny([budget, None], rounds=30)
    state = method.setup()
    weak = method.plan(state, Device(0, "a", budget), 29)
    strong = method.plan(state, Device(1, "b", None), 29)
    assert strong.submodel == weak.submodel
    assert strong.stages[0].work.label == "0 frozen"
    assert weak.stages[0].work.label != "0 frozen"


def test_deploys_the_current_configuration_and_the_full_model(budget: int, shard: Shard) -> None:
    method = tiny([budget], rounds=30)
    state = method.setup()
    assert list(method.deploy(state)) == ["full", configuration(0, method.table[0]).label]
    state = method.merge(state, [train(method, state, 29, Device(0, "a", budget), shard)])
    assert state.facts(Progress).trained == len(method.table) - 1
    assert list(method.deploy(state)) == ["full"]


def test_early_stop_goes_on_when_the_loss_stands_still(budget: int) -> None:
    method = tiny([budget], rounds=30)
    method = SLT(method.task, SLT.Options(rounds="early_stop", patience=2))
    progress = method.setup().facts(Progress)
    seen = []
    for loss in (2.0, 1.5, 1.6, 1.4, 1.5, 1.5, 3.0, 2.0):
        progress = method._judged(progress, loss)
        seen.append(progress.step)
    assert seen == [0, 0, 0, 0, 0, 1, 1, 1]


def test_more_depth_needs_a_narrower_head(budget: int) -> None:
    one, two = tiny([budget]), tiny([budget], depth=2)
    assert sum(two.table[:4]) < sum(one.table[:4])


def test_budget_that_holds_no_layer_is_named() -> None:
    with pytest.raises(BudgetTooSmall, match="head of one channel needs"):
        tiny([20_000]).setup()


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"method\.depth must be at least 1"):
        SLT.Options(depth=0)


@pytest.mark.parametrize(
    ("frozen_in_mean", "expected"), [(False, (6 + 9) / 2), (True, (3 + 6 + 9) / 3)]
)
def test_devices_that_froze_a_layer_count_if_asked_for(
    frozen_in_mean: bool, expected: float
) -> None:
    task = tiny(rounds=4).task
    method = SLT(task, SLT.Options(rounds="equal", frozen_in_mean=frozen_in_mean))
    method.table = [0.5, 0.5, 0.5, 1.0]
    state = method.setup()
    old = {n: torch.full_like(t, 0.1 if "conv1" in n else 3) for n, t in state.tensors.items()}
    state = replace(state, tensors=old)
    # In step 2 one device froze the stem. Nobody trained any conv1.
    updates = []
    for number, value in enumerate((30, 6, 9)):
        plan = method.plan(state, Device(number, "any"), 2)
        sent = {
            name: torch.full_like(tensor, value)
            for name, tensor in cut(old, method.submodels.view(plan.submodel)).items()
            if "conv1" not in name and (number > 0 or not name.startswith("stem"))
        }
        updates.append(Update(plan, sent, samples=1, steps=1, loss=1.0))
    merged = method.merge(state, updates).tensors
    assert torch.all(merged["stem.conv.weight"] == expected)
    assert torch.all(merged["head.linear.bias"] == (30 + 6 + 9) / 3)
    # The upper half of the last layer is not in the configuration.
    assert merged["blocks.2.norm2.weight"].tolist() == [15.0] * 32 + [3.0] * 32
    for name in ("blocks.0.conv1.weight", "blocks.2.conv1.weight"):
        assert torch.equal(merged[name], old[name])


def test_where_the_papers_accounting_holds_nothing_the_last_step_still_has_no_head() -> None:
    method = SLT(tiny().task, SLT.Options(assign="ratio"))
    assert method._widest(6, 1, 1.0) == 1 / 64
    assert method._widest(7, 1, 1.0) == 1.0


# ---- the whole algorithm once more, slow and plain: docs/methods/slt.md for a ResNet

Weights = dict[str, torch.Tensor]

TALL = (1, 32, 8)
"""After two strides, a pool of 4x4 leaves two positions of such images for each channel."""


class Reference:
    """Successive layer training in plain torch: slices of the server's tensors, and loops."""

    def __init__(self, server: Tensors, batch: int) -> None:
        self.server = {name: tensor.clone() for name, tensor in server.items()}
        self.batch = batch
        each = sum(name.endswith("conv1.weight") for name in server) // 3
        self.blocks = [channels for channels in (16, 32, 64) for _ in range(each)]
        self.wider = (each, 2 * each)  # These have a stride of two and a projection.
        self.layers = 1 + 2 * len(self.blocks)

    def layer(self, name: str) -> int:
        """Return the layer of a tensor, from 1: projections have that of their block's conv2."""
        if name.startswith("stem"):
            return 1
        if name.startswith("head"):
            return self.layers + 1
        _, block, part, *_ = name.split(".")
        return 2 + 2 * int(block) + (part not in ("conv1", "norm1"))

    def cut(self, full: int, width: float) -> Weights:
        """Return copies of the tensors of a model with so many full layers and a narrow head."""
        small: Weights = {}

        def kept(layer: int, channels: int) -> int:
            return channels if layer <= full else max(1, int(width * channels))

        def take(convolution: str, norm: str, outputs: int, inputs: int) -> None:
            name = f"{convolution}.weight"
            small[name] = self.server[name][:outputs, :inputs].clone()
            for name in (f"{norm}.weight", f"{norm}.bias"):
                small[name] = self.server[name][:outputs].clone()

        stream = kept(1, 16)
        take("stem.conv", "stem.norm", stream, TALL[0])
        for number, channels in enumerate(self.blocks):
            block = f"blocks.{number}"
            inner, outer = kept(2 + 2 * number, channels), kept(3 + 2 * number, channels)
            take(f"{block}.conv1", f"{block}.norm1", inner, stream)
            take(f"{block}.conv2", f"{block}.norm2", outer, inner)
            if number in self.wider:
                take(f"{block}.projection.conv", f"{block}.projection.norm", outer, stream)
            stream = outer
        small["head.linear.weight"] = self.server["head.linear.weight"][:, : 2 * stream].clone()
        small["head.linear.bias"] = self.server["head.linear.bias"].clone()
        return small

    def forward(self, w: Weights, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of all operations, the logits last; norms use the batch."""
        seen: list[torch.Tensor] = []

        def note(x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return x

        def convolve(x: torch.Tensor, at: str, norm: str, stride: int = 1) -> torch.Tensor:
            x = note(F.conv2d(x, w[f"{at}.weight"], stride=stride, padding=1))
            affine = w[f"{norm}.weight"], w[f"{norm}.bias"]
            return note(F.batch_norm(x, None, None, *affine, training=True))

        x = note(F.relu(convolve(x, "stem.conv", "stem.norm")))
        for number in range(len(self.blocks)):
            block, stride = f"blocks.{number}", 2 if number in self.wider else 1
            inner = note(F.relu(convolve(x, f"{block}.conv1", f"{block}.norm1", stride)))
            residual = convolve(inner, f"{block}.conv2", f"{block}.norm2")
            if number in self.wider:
                names = f"{block}.projection.conv", f"{block}.projection.norm"
                shortcut = convolve(x, *names, stride)
            else:
                # The first channels, where it is wider. A shortcut counts like a layer.
                shortcut = note(x[:, : residual.shape[1]])
            x = note(F.relu(note(residual + shortcut)))
        x = note(note(F.avg_pool2d(x, (4, 2))).flatten(1))
        return [*seen, F.linear(x, w["head.linear.weight"], w["head.linear.bias"])]

    @cache  # noqa: B019
    def memory(self, full: int, frozen: int, width: float) -> int:
        """Return the bytes of a step as SLT counts them: outputs that learn, weights, gradients."""
        small = self.cut(full, width)
        learn = [t.requires_grad_() for n, t in small.items() if self.layer(n) > frozen]
        outputs = self.forward(small, torch.zeros((self.batch, *TALL)))
        counted = [t for t in outputs if t.requires_grad] + list(small.values()) + learn
        return 4 * sum(tensor.numel() for tensor in counted)

    def widths(self, budget: int) -> list[float]:
        """Walk from the last layer to pre-training and narrow the head until it fits."""
        found: list[float] = []
        channels = 64  # Of the widest layer: the others follow in quarters and halves.
        for n in range(self.layers, -1, -1):
            while self.memory(n, max(n - 1, 0), channels / 64) > budget:
                channels -= 1
            found.insert(0, channels / 64)
        return found[: found.index(1.0) + 1]

    def frozen(self, n: int, width: float, budget: int) -> int:
        """Return the fewest frozen layers of step n that fit, or all that the step freezes."""
        choices = range(max(n - 1, 0))
        fitting = (f for f in choices if self.memory(n, f, width) <= budget)
        return next(fitting, max(n - 1, 0))

    def trained(
        self,
        full: int,
        frozen: int,
        width: float,
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        recipe: Recipe,
    ) -> Weights:
        """Return what a device sends, after SGD with momentum and decay on what is not frozen."""
        small = self.cut(full, width)
        learn = {n: t.requires_grad_() for n, t in small.items() if self.layer(n) > frozen}
        velocity: Weights = {}
        for images, labels in batches:
            loss = F.cross_entropy(self.forward(small, images)[-1], labels)
            gradients = torch.autograd.grad(loss, list(learn.values()))
            with torch.no_grad():
                for (name, weight), gradient in zip(learn.items(), gradients, strict=True):
                    step = gradient.add(weight, alpha=recipe.weight_decay)
                    if name in velocity:
                        step = velocity[name] * recipe.momentum + step
                    velocity[name] = step
                    weight.sub_(step, alpha=recipe.lr)
        return learn

    def merge(self, updates: Sequence[Weights]) -> None:
        """Replace every entry that somebody sent by the plain mean of what was sent."""
        for name, old in self.server.items():
            total, senders = torch.zeros_like(old), torch.zeros_like(old)
            for update in updates:
                if name in update:
                    place = tuple(slice(0, size) for size in update[name].shape)
                    total[place] += update[name].detach()
                    senders[place] += 1
            self.server[name] = torch.where(senders > 0, total / senders, old)


def ratio_task(model: str, *ratios: float) -> Task:
    recipe = Recipe(lr=0.05, weight_decay=1e-3, batch=16, weighting="equal")
    return Task(ModelConfig(model), recipe, TALL, 3, ratios=ratios)


def test_head_widths_and_switch_points_are_those_of_the_plain_walk() -> None:
    task = replace(ratio_task("resnet8", 0.5), rounds=1000)
    method = SLT(task, SLT.Options(assign="ratio"))
    reference = Reference(method.setup().tensors, task.recipe.batch)
    widths = reference.widths(reference.memory(0, 0, 0.5))
    assert len(widths) > 4
    assert method.table == widths
    sizes = [sum(t.numel() for t in reference.cut(n, s).values()) for n, s in enumerate(widths)]
    assert method.ends() == [1000 * size // sizes[-1] for size in sizes]


def test_every_round_is_the_plain_algorithms() -> None:
    """Pre-training and some of ten steps; two weak devices, and one that freezes less."""
    widths = [0.25, 0.25, 0.25, 0.3125, 0.34375, 0.40625, 0.5, 0.59375, 0.75, 0.84375, 1.0]
    task = replace(ratio_task("resnet14", 0.25, 0.5), rounds=len(widths))
    method = SLT(task, SLT.Options(assign="ratio", rounds="equal"))
    method.table = widths
    state = method.setup()
    reference = Reference(state.tensors, task.recipe.batch)
    images = torch.randint(0, 256, (96, *TALL), dtype=torch.uint8)
    shards = [
        Shard(images, torch.arange(96) % 3, rows, Transform("crop-flip", (0.5,), (0.2,)))
        for rows in torch.arange(96).reshape(3, 32)
    ]
    devices = [Device(n, "any", ratio=ratio) for n, ratio in enumerate((0.25, 0.25, 0.5))]
    seen = set()
    for n in (0, 1, 2, 6, 8, 10):
        width, updates, sent = widths[n], [], []
        for device, shard in zip(devices, shards, strict=True):
            frozen = reference.frozen(n, width, reference.memory(0, 0, device.ratio or 1))
            seen.add((n, frozen))
            generator = rng.torch_generator(task.seed, "batches", n, device.id)
            batches = shard.batches(task.recipe.batch, generator)
            sent.append(reference.trained(n, frozen, width, batches, task.recipe))
            updates.append(train(method, state, n, device, shard))
            assert set(updates[-1].tensors) == set(sent[-1])
        state = method.merge(state, updates)
        reference.merge(sent)
        for name, tensor in reference.server.items():
            assert torch.equal(state.tensors[name], tensor)
    assert {(0, 0), (1, 0), (2, 1), (8, 7), (10, 9)} < seen
    assert any(0 < frozen < n - 1 for n, frozen in seen)
