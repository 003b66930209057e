"""FeDepth against plain loops, and what it promises about bytes, freezing and peers."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depth_cases import (
    NARROW,
    RENAMED,
    VIT,
    make_runner,
    make_task,
    plan_for,
    start,
    train,
    whole_peak,
)
from sizewise import config as configs
from sizewise.common import rng
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.pool import PoolEngine
from sizewise.exchange.plan import Plan, Refusal, Update
from sizewise.exchange.state import State, sha256
from sizewise.exchange.view import Tensors
from sizewise.fleet.devices import Device
from sizewise.methods.fedepth import FeDepth, mutual
from sizewise.methods.fedepth.blocks import PEERS, Blocks, Run
from sizewise.methods.fedepth.schedule import in_order
from sizewise.runs import session
from sizewise.runs.folder import RunFolder, Totals
from sizewise.steps.optimizers import make_optimizer
from sizewise.training import buffering
from sizewise.training.loop import workload
from text_cases import text_task

Runs = Sequence[tuple[int, int]]
RUNS: Runs = ((0, 1), (1, 3), (3, 4))


def make(task: Any = None, **options: Any) -> FeDepth:
    return FeDepth(task or make_task(epochs=2), FeDepth.Options(**options))


def inner(tensors: Tensors) -> dict[str, Tensor]:
    """Return the model's own tensors of a device's, by the server's names."""
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# ---- one round by hand


def way_out(received: Tensors, stop: int, channels: int) -> nn.Module | None:
    """Return the way out after so many blocks, if it has weights, with those received."""
    own = {
        name.removeprefix(f"exits.{stop}."): tensor
        for name, tensor in received.items()
        if name.startswith(f"exits.{stop}.")
    }
    if not own:
        return None
    if list(own) == ["weight"]:
        way: nn.Module = nn.Conv2d(channels, 12, 1, {4: 4, 8: 2}[channels], bias=False)
    else:
        norm = nn.BatchNorm2d(channels, track_running_stats="0.running_mean" in own)
        head = nn.Linear(channels, 3)
        way = nn.Sequential(norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    way.load_state_dict(own)
    return way


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def by_hand(
    runner: DeviceRunner,
    state: State,
    runs: Runs,
    bypassed: Sequence[int] = (),
    device: int = 0,
    lasting: Make | None = None,
) -> dict[str, Tensor]:
    """Train runs of blocks as one would write it down; return all tensors by the server's names.

    With `lasting`, one optimiser of torch's holds all parameters from the first run to the last.
    """
    task, data = runner.method.task, runner.dataset
    recipe = task.recipe
    names = [name for name in state.tensors if not name.startswith("exits.")]
    model: Any = task.build()
    model.load_state_dict({name: state.tensors[name] for name in names})
    blocks = list(model.blocks)
    widths = [4, 4, 8, 12]
    ways = {stop: way_out(state.tensors, stop, widths[stop - 1]) for _, stop in runs}
    rows = runner.partition.shard(device)
    images = runner.transform(data.train_inputs, None)
    generator = rng.torch_generator(task.seed, "batches", 0, device)
    everything = [p for part in (model, *ways.values()) if part for p in part.parameters()]
    one = None if lasting is None else lasting(everything)
    for begin, stop in runs:
        before = [block for n, block in enumerate(blocks[:begin]) if n not in bypassed]
        way, last = ways[stop], stop == len(blocks)
        own_head = isinstance(way, nn.Sequential)
        learning: list[nn.Module] = blocks[begin:stop]
        learning += [] if before else [model.stem]
        learning += [] if way is None else [way]
        learning += [] if own_head else [model.head]
        model.requires_grad_(False).eval()
        for module in learning:
            module.requires_grad_(True).train()
        parameters = [p for module in learning for p in module.parameters()]
        optimizer = one or make_optimizer(recipe, parameters, recipe.lr)
        for _ in range(recipe.epochs):
            order = rows[torch.randperm(len(rows), generator=generator)]
            for batch in order.split(recipe.batch):
                if len(batch) == 1:
                    continue
                x = model.stem(images[batch])
                for block in (*before, *blocks[begin:stop]):
                    x = block(x)
                if way is not None:
                    x = way(x)
                elif not last:
                    step = x.shape[2] // 2  # The last map has 2x2 pixels and 12 channels.
                    x = x[:, :, ::step, ::step]
                    zeros = torch.zeros(len(x), (12 - x.shape[1]) // 2, 2, 2)
                    x = torch.cat([zeros, x, zeros], 1)
                logits = x if own_head else model.head(x)
                optimizer.zero_grad()
                F.cross_entropy(logits, data.train_labels[batch]).backward()
                optimizer.step()
    trained = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for stop, way in ways.items():
        if way is not None:
            trained |= {f"exits.{stop}.{n}": t.detach() for n, t in way.state_dict().items()}
    return trained


@pytest.mark.parametrize(
    ("options", "runs", "bypassed", "recipe"),
    [
        ({}, RUNS, (), {}),
        ({}, ((0, 2), (2, 4)), (), {"optimizer": "adam", "lr": 0.01}),
        ({}, ((1, 2), (3, 4)), (), {"norm": "tracked"}),
        ({"skip": "bypass"}, ((2, 3), (3, 4)), (0, 1), {}),
        ({"link": "conv"}, RUNS, (), {}),
        ({"heads": "auxiliary"}, RUNS, (), {}),
        ({"heads": "auxiliary"}, ((0, 2), (2, 3), (3, 4)), (), {"norm": "tracked"}),
    ],
    ids=["pad", "adam", "pass", "bypass", "conv", "auxiliary", "auxiliary, tracked"],
)
def test_a_round_is_the_plain_loop(
    options: dict[str, Any], runs: Runs, bypassed: Sequence[int], recipe: dict[str, Any]
) -> None:
    fedepth = make(make_task(**{"epochs": 2, **recipe}), **options)
    plan = plan_for(fedepth, runs, bypassed=bypassed, device=1)
    state = start(fedepth, plan)
    runner = make_runner(fedepth)
    update = train(runner, state, plan)
    expected = by_hand(runner, state, runs, bypassed, device=1)
    view = fedepth.submodels.view(plan.submodel)
    found = {view[name].name: tensor for name, tensor in update.tensors.items()}
    assert found
    same(found, {name: expected[name] for name in found})
    # All else is as it was received, and is not sent.
    for name in expected.keys() - found.keys():
        assert torch.equal(expected[name], state.tensors[name]), name


SGD: Make = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
AMSGRAD: Make = partial(torch.optim.Adam, lr=0.01, weight_decay=5e-4, amsgrad=True)


@pytest.mark.parametrize(
    ("options", "recipe", "lasting"),
    [
        ({}, {}, SGD),
        ({"link": "conv"}, {}, SGD),
        ({}, {"optimizer": "amsgrad", "lr": 0.01}, AMSGRAD),
    ],
    ids=["pad", "conv", "amsgrad"],
)
def test_one_optimizer_for_a_round_is_that_of_the_plain_loop(
    options: dict[str, Any], recipe: dict[str, Any], lasting: Make
) -> None:
    fedepth = make(make_task(**{"epochs": 2, **recipe}), optimizers="round", **options)
    plan = plan_for(fedepth, RUNS, device=1)
    runner, state = make_runner(fedepth), start(fedepth, plan)
    update = train(runner, state, plan)
    view = fedepth.submodels.view(plan.submodel)
    found = {view[name].name: tensor for name, tensor in update.tensors.items()}
    same(found, by_hand(runner, state, RUNS, device=1, lasting=lasting))
    assert update.device_state == {}, "it lasts no longer than a round"
    # With fresh ones only the first run, which has nothing to go on from, is the same.
    fresh = inner(train(make_runner(other := make(fedepth.task, **options)), state, plan).tensors)
    assert other.options.optimizers == "stage"
    for name, tensor in fresh.items():
        begins = name.startswith(("stem", "blocks.0"))
        assert torch.equal(tensor, found[name]) == begins, name


def test_peers_keep_their_optimizer_as_well() -> None:
    updates = {}
    for lasting in ("stage", "round"):
        fedepth = make(make_task(epochs=1), optimizers=lasting)
        schedule = in_order([fedepth.scheduler.mixed(0, 0, 2), fedepth.scheduler.mixed(0, 2, 4)])
        stages = tuple(replace(stage, lr=0.05) for stage in schedule.stages)
        plan = Plan(0, 0, "rich", schedule.submodel, stages)
        updates[lasting] = train(make_runner(fedepth), fedepth.setup(), plan)
    stage, lasts = updates["stage"], updates["round"]
    names = {f"peers.0.{n}" for n in inner(lasts.tensors)}
    assert stage.device_state.keys() == lasts.device_state.keys() == names
    name = "model.blocks.0.conv1.weight"
    assert not torch.equal(stage.tensors[name], lasts.tensors[name]), "the whole model trains on"


def test_only_what_was_trained_is_sent_and_moves_the_server() -> None:
    fedepth = make()
    plan = plan_for(fedepth, [(2, 3), (3, 4)])  # The first two do not fit.
    state, runner = start(fedepth, plan), make_runner(fedepth)
    update = train(runner, state, plan)
    parts = {".".join(name.split(".")[:3]) for name in update.tensors}
    assert {part for part in parts if "head" not in part} == {"model.blocks.2", "model.blocks.3"}
    merged = fedepth.merge(state, [update]).tensors
    for name, tensor in state.tensors.items():
        covered = name.startswith(("blocks.2", "blocks.3", "head"))
        assert torch.equal(merged[name], tensor) != covered, name


def test_the_head_goes_on_from_run_to_run_and_blocks_from_what_was_received() -> None:
    fedepth = make()
    runner = make_runner(fedepth)
    both = plan_for(fedepth, [(0, 2), (2, 4)])
    state = start(fedepth, both)
    whole = inner(train(runner, state, both).tensors)
    first = inner(train(runner, state, replace(both, stages=both.stages[:1])).tensors)
    for name in first:
        assert torch.equal(whole[name], first[name]) == name.startswith(("stem", "blocks")), name
    assert not torch.equal(whole["head.linear.weight"], first["head.linear.weight"])
    assert not torch.equal(first["head.linear.weight"], state.tensors["head.linear.weight"])


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_frozen_blocks_keep_their_bits_and_statistics(stop: int) -> None:
    # Momentum and weight decay are on; the blocks before were trained earlier in the same round.
    fedepth = make(make_task(epochs=2, norm="tracked", momentum=0.9, weight_decay=0.1))
    runner = make_runner(fedepth)
    plan = plan_for(fedepth, [(number, number + 1) for number in range(stop + 1)])
    state = start(fedepth, plan)
    before = inner(train(runner, state, replace(plan, stages=plan.stages[:stop])).tensors)
    after = inner(train(runner, state, plan).tensors)
    for name in before:
        if not name.startswith("head"):
            assert torch.equal(before[name], after[name]), name
    assert int(after["blocks.0.norm1.num_batches_tracked"]) == 4
    module = inner(dict(fedepth.submodels.module(plan.submodel).state_dict()))
    for name, tensor in state.tensors.items():
        if any(name.startswith(f"blocks.{number}.") for number in range(stop + 1, 4)):
            assert name not in after
            assert torch.equal(module[name], tensor), name


def test_dropout_is_off_in_frozen_blocks() -> None:
    task = make_task("vit", {**VIT, "dropout": 0.5}, epochs=1)
    fedepth = make(task)
    plan = plan_for(fedepth, [(1, 2)])
    runner, state = make_runner(fedepth), start(fedepth, plan)
    module: Any = fedepth.submodels.module(plan.submodel)
    seen: list[tuple[nn.Module, Tensor]] = []
    handles = [
        part.register_forward_hook(lambda part, _, out: seen.append((part, out.detach())))
        for part in (module.model.stem, *module.model.blocks)
    ]
    train(runner, state, plan)
    for handle in handles:
        handle.remove()
    assert {part for part, _ in seen} == {module.model.stem, *module.model.blocks[:2]}
    modes = [part.training for part in (module.model.stem, *module.model.blocks[:2])]
    assert modes == [False, False, True]
    # Without dropout the embedding of an image is the same in every epoch: no zeros in it.
    embedded = [out for part, out in seen if part is module.model.stem]
    assert all((out != 0).all() for out in embedded)
    learned = [out for part, out in seen if part is module.model.blocks[1]]
    assert len(learned) == len(embedded) == 2


# ---- bytes


@cache
def metered(heads: str, link: str, optimizer: str, batch: int) -> FeDepth:
    lr = 0.001 if optimizer == "adam" else 0.05
    task = make_task(optimizer=optimizer, batch=batch, lr=lr, epochs=2, max_steps=2)
    return make(task, heads=heads, link=link)


@pytest.mark.parametrize(("optimizer", "batch"), [("sgd", 32), ("adam", 128)])
@pytest.mark.parametrize(
    ("heads", "link"), [("skip", "pad"), ("skip", "conv"), ("auxiliary", "pad")]
)
def test_metered_is_predicted_for_every_stage(
    heads: str, link: str, optimizer: str, batch: int
) -> None:
    fedepth = metered(heads, link, optimizer, batch)
    runner = with_rows(make_runner(fedepth), batch)
    plan = plan_for(fedepth, RUNS)
    state = start(fedepth, plan)
    for stage in plan.stages:
        predicted = fedepth.peak(plan.submodel, stage)
        update = train(runner, state, replace(plan, stages=(stage,), budget=predicted))
        assert update.peak_bytes == predicted
        short = runner.train(state, replace(plan, stages=(stage,), budget=predicted - 1))
        assert isinstance(short, Refusal)
        assert "out of budget" in short.reason


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "amsgrad"])
def test_what_an_optimizer_keeps_is_within_the_predicted_bytes(optimizer: str) -> None:
    # With two samples weights are all that counts, and the last blocks have the most of them: what
    # is kept of earlier ones would show.
    task = replace(make_task(optimizer=optimizer, batch=2, epochs=2, lr=0.01), enforce=True)
    fedepth = make(task, optimizers="round")
    plan = plan_for(fedepth, ((1, 2), (2, 3), (3, 4)))
    peaks = [fedepth.peak(plan.submodel, stage) for stage in plan.stages]
    assert max(peaks) == peaks[-1]
    runner, state = make_runner(fedepth), start(fedepth, plan)
    assert train(runner, state, replace(plan, budget=peaks[-1])).peak_bytes == peaks[-1]
    short = runner.train(state, replace(plan, budget=peaks[-1] - 1))
    assert isinstance(short, Refusal)


def test_metered_is_predicted_for_models_that_learn_together() -> None:
    fedepth = make(make_task(batch=32, epochs=2, max_steps=2), models=3)
    runner, state = with_rows(make_runner(fedepth), 32), fedepth.setup()
    schedules = [fedepth.scheduler.regular(2), fedepth.scheduler.mixed(1, 1, 3)]
    for schedule in schedules:
        schedule = in_order([schedule])
        plan = Plan(0, 0, "rich", schedule.submodel, (replace(schedule.stages[0], epochs=2),))
        predicted = fedepth.peak(plan.submodel, plan.stages[0])
        assert train(runner, state, replace(plan, budget=predicted)).peak_bytes == predicted


def with_rows(runner: DeviceRunner, count: int) -> DeviceRunner:
    """Return a runner whose devices have so many samples, some of them often."""
    return replace(
        runner, partition=Partition(torch.arange(3 * count) % 36, torch.arange(4) * count)
    )


# ---- fixed batches and buffers


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Return what tells which temporary files there are."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return lambda: [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture
def places(
    monkeypatch: pytest.MonkeyPatch, files: Callable[[], list[Path]]
) -> list[tuple[bool, int]]:
    """Return what will list all buffers made: whether in memory, and how many files there are."""
    made = []
    allocate = buffering.allocate

    def spy(*arguments: Any) -> tuple[Tensor, bool]:
        tensor, in_memory = allocate(*arguments)
        made.append((in_memory, len(files())))
        return tensor, in_memory

    monkeypatch.setattr(buffering, "allocate", spy)
    return made


@pytest.mark.parametrize(
    ("runs", "norm"),
    [(RUNS, "batch"), (RUNS, "tracked"), (((2, 3), (3, 4)), "batch")],
    ids=["batch", "tracked", "some"],
)
def test_buffers_do_not_change_a_bit(
    runs: Runs, norm: str, places: list[tuple[bool, int]], files: Callable[[], list[Path]]
) -> None:
    task = make_task(epochs=2, norm=norm, augment="crop-flip")
    fixed, buffered = make(task, data="fixed"), make(task, data="buffered")
    runner = make_runner(fixed)
    state = start(fixed, plan_for(fixed, runs))
    expected = train(runner, state, plan_for(fixed, runs, device=2)).tensors
    assert places == [(True, 0)]
    places.clear()
    runner = make_runner(buffered)
    plan = plan_for(buffered, runs, device=2)
    in_memory = train(runner, state, plan)
    same(in_memory.tensors, expected)
    assert places == [(True, 0)] * 5  # Images, then the stem's outputs and those of three blocks.
    places.clear()
    tight = max(buffered.peak(plan.submodel, stage) for stage in plan.stages)
    on_disk = train(runner, state, replace(plan, budget=tight))
    same(on_disk.tensors, expected)
    # Small feature maps may find room in a late stage.
    assert places[:3] == [(False, 0)] * 3
    assert len(places) == 5
    assert on_disk.peak_bytes is not None
    assert on_disk.peak_bytes <= tight
    assert not files()


def test_fresh_batches_are_others() -> None:
    task = make_task(epochs=2, augment="crop-flip")
    seen = {}
    for data in ("fresh", "fixed"):
        fedepth = make(task, data=data)
        plan = plan_for(fedepth, RUNS)
        seen[data] = train(make_runner(fedepth), start(fedepth, plan), plan).tensors
    assert not torch.equal(*(t["model.head.linear.weight"] for t in seen.values()))


@pytest.mark.parametrize("data", ["fixed", "buffered"])
def test_buffers_are_in_memory_as_far_as_there_is_room(
    data: str, places: list[tuple[bool, int]]
) -> None:
    fedepth = make(make_task(epochs=2), data=data)
    runner = make_runner(fedepth)
    state = fedepth.setup()
    base = plan_for(fedepth, [(0, 2), (2, 4)], device=1)  # One of its nine samples is left over.
    tight = max(fedepth.peak(base.submodel, stage) for stage in base.stages)
    images = 9 * 64 * 4
    seen, results = [], []
    for budget in (tight, tight + images - 1, tight + images, tight + 5000, tight + 10**6):
        places.clear()
        update = train(runner, state, replace(base, budget=budget))
        assert update.peak_bytes is not None
        assert update.peak_bytes <= budget
        seen.append(sum(in_memory for in_memory, _ in places))
        results.append(update)
        assert len(places) == (1 if data == "fixed" else 4)
    assert seen[:3] == ([0, 0, 1] if data == "fixed" else [seen[0], seen[0], seen[0] + 1])
    assert seen == sorted(seen)
    assert seen[-1] == len(places)
    for update in results[1:]:
        same(update.tensors, results[0].tensors)
    # A device is not told the peak of another one with the same stages and more room.
    peaks = [update.peak_bytes or 0 for update in results]
    assert peaks[0] < peaks[-1]
    assert train(runner, state, replace(base, budget=tight)).peak_bytes == peaks[0]


def test_what_a_stage_left_is_not_alive_while_a_buffer_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fedepth = make(make_task(), data="buffered")
    plan = plan_for(fedepth, RUNS)
    through, alive = buffering.Buffer.through, []

    def spy(buffer: buffering.Buffer, module: nn.Module, *rest: Any) -> buffering.Buffer:
        alive.append(sum(parameter.grad is not None for parameter in module.parameters()))
        return through(buffer, module, *rest)

    monkeypatch.setattr(buffering.Buffer, "through", spy)
    train(make_runner(fedepth), fedepth.setup(), plan)
    assert alive == [0] * 4


def test_a_buffer_counts_with_the_samples_left_over() -> None:
    fedepth = make(make_task(), data="buffered")
    plan = replace(plan_for(fedepth, [(0, 2), (2, 4)]), budget=10**6)
    peak = fedepth.peak(plan.submodel, plan.stages[1])
    held = torch.empty(9, 1, 8, 8)[:8]
    assert fedepth._room(plan, plan.stages[1:], [held]) == 10**6 - peak - 9 * 64 * 4


def test_files_are_gone_after_a_failure(
    files: Callable[[], list[Path]], places: list[tuple[bool, int]]
) -> None:
    fedepth = make(make_task(epochs=2), data="buffered")
    plan = plan_for(fedepth, RUNS)
    outcome = make_runner(fedepth).train(fedepth.setup(), replace(plan, budget=20_000))
    assert isinstance(outcome, Refusal)
    assert not places[0][0]
    assert not files()


# ---- a part of a batch at a time


@pytest.mark.parametrize(
    ("model", "args", "norm"), [(NARROW, {}, "tracked"), ("vit", VIT, "batch")]
)
def test_prefixes_in_parts_give_the_same(model: str, args: dict[str, Any], norm: str) -> None:
    fedepth = make(make_task(model, args, norm=norm))
    whole = plan_for(fedepth, [(1, 2), (2, 3)])
    stages = []
    for stage in whole.stages:
        run = replace(stage.work, blocks=replace(stage.work.blocks, micro=3))
        (part,) = fedepth.scheduler._staged(run).stages
        assert part.work.blocks.micro == 3
        stages.append(replace(part, lr=stage.lr, epochs=stage.epochs))
    runner, state = make_runner(fedepth), fedepth.setup()
    expected = train(runner, state, whole).tensors
    found = train(runner, state, replace(whole, stages=tuple(stages))).tensors
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


# ---- mutual learning


@pytest.mark.parametrize("count", [2, 3])
def test_mutual_loss_by_hand(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(4, 3, generator=generator, requires_grad=True) for _ in range(count)]
    labels = torch.tensor([0, 2, 1, 1])

    class Given:
        model, peers = 0, tuple(range(1, count))

        def __call__(self, inputs: Tensor, blocks: Blocks, model: int) -> Tensor:
            return logits[model]

    others = (Blocks((0,)),) * (count - 1)
    found = mutual(Given(), torch.empty(4), labels, Run(Blocks((0,)), others))  # type: ignore[arg-type]
    found.backward()
    total = 0.0
    for i, own in enumerate(logits):
        mine = [math.log(p) for p in own.detach().softmax(1)[range(4), labels].tolist()]
        total -= sum(mine) / 4
        gradient = (own.softmax(1) - F.one_hot(labels, 3)) / 4
        for j, other in enumerate(logits):
            if j != i:
                p, q = other.detach().softmax(1), own.detach().softmax(1)
                total += float((p * (p / q).log()).sum()) / 4 / (count - 1)
                gradient = gradient + (q - p) / 4 / (count - 1)  # As a teacher it gets none.
        torch.testing.assert_close(own.grad, gradient.detach())
    assert float(found.detach()) == pytest.approx(total, abs=1e-6)


def together(fedepth: FeDepth, peers: int, device: int = 0, round_index: int = 0) -> Plan:
    schedule = fedepth.scheduler.regular(peers)
    whole = fedepth.task.stage(round_index)
    stage = replace(schedule.stages[0], lr=whole.lr, epochs=whole.epochs)
    return Plan(device, round_index, "rich", schedule.submodel, (stage,))


def two_by_hand(runner: DeviceRunner, nets: list[nn.Module], round_index: int) -> None:
    """Train two models with two optimisers, as the paper writes it."""
    task, data = runner.method.task, runner.dataset
    recipe, rows = task.recipe, runner.partition.shard(0)
    images = runner.transform(data.train_inputs, None)
    generator = rng.torch_generator(task.seed, "batches", round_index, 0)
    optimizers = [make_optimizer(recipe, list(net.parameters()), recipe.lr) for net in nets]
    for _ in range(recipe.epochs):
        order = rows[torch.randperm(len(rows), generator=generator)]
        for batch in order.split(recipe.batch):
            labels = data.train_labels[batch]
            z = [net(images[batch]) for net in nets]
            for optimizer, own, other in zip(optimizers, z, reversed(z), strict=True):
                p, q = other.detach().softmax(1), own.softmax(1)
                divergence = (p * (p.log() - q.log())).sum(1).mean()
                optimizer.zero_grad()
                (F.cross_entropy(own, labels) + divergence).backward()
            for optimizer in optimizers:
                optimizer.step()


def test_two_rounds_of_two_models_by_hand() -> None:
    fedepth = make(make_task(epochs=2))
    runner, state = make_runner(fedepth), fedepth.setup()
    nets = [fedepth.task.build(), fedepth.task.build()]  # The peer starts from what comes first.
    for round_index in range(2):
        update = train(runner, state, together(fedepth, 1, round_index=round_index))
        two_by_hand(runner, nets, round_index)
        for prefix, tensors, net in (
            ("model.", update.tensors, nets[0]),
            ("peers.0.", update.device_state, nets[1]),
        ):
            expected = net.state_dict()
            assert tensors.keys() == {prefix + name for name in expected}
            for name, tensor in expected.items():
                torch.testing.assert_close(tensors[prefix + name], tensor, rtol=1e-4, atol=1e-6)
        if round_index == 0:
            # They are the same so far: the same start, data, and teachers that agree.
            same({n[8:]: t for n, t in update.device_state.items()}, inner(update.tensors))
            drawn = torch.Generator().manual_seed(5)
            news = {
                n: t + 0.1 * torch.rand(t.shape, generator=drawn)
                for n, t in nets[0].state_dict().items()
            }
            nets[0].load_state_dict(news)
            state = State(news, devices={0: update.device_state})
    peer, own = (t["head.linear.weight"] for t in (nets[1].state_dict(), nets[0].state_dict()))
    assert not torch.allclose(peer, own, atol=1e-3)


def test_another_peer_starts_from_what_is_received_when_it_comes() -> None:
    fedepth = make(make_task(), models=3)
    runner, state = make_runner(fedepth), fedepth.setup()
    memory = train(runner, state, together(fedepth, 1)).device_state
    news = State({n: t + 0.01 for n, t in state.tensors.items()}, devices={0: memory})
    seen = {}
    fit = fedepth.trainer.fit

    def spy(plan: Plan, tensors: Tensors, *rest: Any, **named: Any) -> Update:
        seen.update(tensors)
        return fit(plan, tensors, *rest, **named)

    fedepth.trainer.fit = spy  # type: ignore[method-assign]
    update = train(runner, news, together(fedepth, 2, round_index=1))
    for name, tensor in news.tensors.items():
        assert torch.equal(seen[f"{PEERS}0.{name}"], memory[f"{PEERS}0.{name}"])
        assert torch.equal(seen[f"{PEERS}1.{name}"], tensor)
    assert {name.split(".")[1] for name in update.device_state} == {"0", "1"}


def test_blocks_of_a_peer_in_turn() -> None:
    fedepth = make(make_task(epochs=1, weight_decay=0.1))
    runner, state = make_runner(fedepth), fedepth.setup()
    schedule = in_order([fedepth.scheduler.mixed(0, 0, 2), fedepth.scheduler.mixed(0, 2, 4)])
    stages = tuple(replace(stage, lr=0.05) for stage in schedule.stages)
    plan = Plan(0, 0, "rich", schedule.submodel, stages)
    first = train(runner, state, replace(plan, stages=stages[:1]))
    both = train(runner, state, plan)
    for name in state.tensors:
        unmoved = torch.equal(first.device_state[f"peers.0.{name}"], state.tensors[name])
        assert unmoved == name.startswith(("blocks.2", "blocks.3")), name
        kept = torch.equal(
            first.device_state[f"peers.0.{name}"], both.device_state[f"peers.0.{name}"]
        )
        assert kept == name.startswith(("stem", "blocks.0", "blocks.1")), name
        assert not torch.equal(first.tensors[f"model.{name}"], both.tensors[f"model.{name}"])
    assert both.tensors.keys() == {f"model.{name}" for name in state.tensors}


# ---- with other recipes


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"),
    # Batches of 8; devices that train 3 runs, 2 runs and everything at once.
    [
        (2, 48, ([4, 4, 4], [6, 6], [12])),
        (1, 40, ([1, 2, 2], [2, 3], [5])),
        (1, 9, ([1] * 3, [1] * 2, [1])),
    ],
)
def test_epochs_in_total_are_the_same_steps_for_all(
    epochs: int, rows: int, steps: tuple[list[int], ...]
) -> None:
    task = make_task(epochs=epochs, ratios=(0.4, 0.6, 1.0))
    fedepth = make(task, assign="ratio", epochs="total")
    runner, state = with_rows(make_runner(fedepth), rows), fedepth.setup()
    for ratio, expected in zip((0.4, 0.6, 1.0), steps, strict=True):
        plan = fedepth.plan(state, Device(0, "some", ratio=ratio), 0)
        assert [workload(stage, rows, task.recipe)[0] for stage in plan.stages] == expected
        assert train(runner, state, plan).steps == sum(expected)


def test_epochs_for_each_run_are_all_of_them() -> None:
    task = make_task(epochs=2, ratios=(0.4,))
    fedepth = make(task, assign="ratio")
    plan = fedepth.plan(fedepth.setup(), Device(0, "some", ratio=0.4), 0)
    assert [workload(stage, 48, task.recipe) for stage in plan.stages] == [(12, 96)] * 3


def test_a_single_step_does_not_speak_for_devices_that_take_several() -> None:
    task = make_task(epochs=1, ratios=(0.4,), optimizer="adam", lr=0.001)
    fedepth = make(task, assign="ratio", epochs="total")
    state, device = fedepth.setup(), Device(0, "some", ratio=0.4)
    plan = fedepth.plan(state, device, 0)
    # Both have more than two batches; the first takes one step in each run, the second two.
    one, two = (train(with_rows(make_runner(fedepth), n), state, plan) for n in (24, 48))
    assert (one.steps, two.steps) == (3, 6)
    assert one.peak_bytes is not None
    assert two.peak_bytes is not None
    assert one.peak_bytes < two.peak_bytes == plan.predicted


def test_learning_rate_follows_the_schedule() -> None:
    fedepth = make(make_task(schedule="cosine", ratios=(0.4,)), assign="ratio")
    plan = fedepth.plan(State({}), Device(0, "some", ratio=0.4), 1)
    assert {stage.lr for stage in plan.stages} == {fedepth.task.recipe.lr_at(1, 3)}


def test_proximal_term_pulls_towards_what_was_received() -> None:
    # With the whole gradient but the pull taken away, a run leaves what it trains at its start.
    moved = {}
    for mu in (0.0, 5.0):
        fedepth = make(make_task(epochs=3, proximal=mu, momentum=0.0))
        plan = plan_for(fedepth, [(0, 2), (2, 4)])
        state = start(fedepth, plan)
        update = inner(train(make_runner(fedepth), state, plan).tensors)
        moved[mu] = {n: float((update[n] - t).norm()) for n, t in state.tensors.items()}
    for part in ("stem.conv.weight", "blocks.0.conv1.weight", "blocks.3.conv2.weight"):
        assert moved[5.0][part] < 0.7 * moved[0.0][part]
    # Also the head, in the second run: towards what came from the server, not from the first run.
    assert moved[5.0]["head.linear.weight"] < 0.7 * moved[0.0]["head.linear.weight"]


def test_server_optimiser_leaves_alone_what_nobody_trained() -> None:
    fedepth = make(make_task(server="fedadam", server_lr=0.1), heads="auxiliary")
    runner = make_runner(fedepth)
    plan = plan_for(fedepth, [(2, 3), (3, 4)])
    other = plan_for(fedepth, [(0, 1), (1, 2)])
    state = start(fedepth, plan, other)
    first = fedepth.merge(state, [train(runner, state, plan)])
    second = fedepth.merge(first, [train(runner, first, replace(plan, round=1))])
    for name in state.tensors:
        covered = name.startswith(("blocks.2", "blocks.3", "head", "exits.3"))
        for before, after in ((state, first), (first, second)):
            assert torch.equal(before.tensors[name], after.tensors[name]) != covered, name
        assert (f"first/{name}" in second.server_state) == covered
    step = first.tensors["exits.3.4.weight"] - state.tensors["exits.3.4.weight"]
    assert float(step.abs().max()) <= 0.1 * 0.1 / math.sqrt(0.01) + 1e-6  # eta m / sqrt(v)


# ---- models of one's own


@pytest.mark.parametrize(
    ("model", "anatomy", "names"),
    [
        ("depth_cases:sequential", {}, ("0.", "1.", "2.", "3.", "4.", "5.")),
        (
            "depth_cases:Renamed",
            RENAMED,
            ("entry.", *(f"layers.{number}." for number in range(4)), "classifier."),
        ),
    ],
)
def test_a_model_of_ones_own_gives_the_same_bits(
    model: str, anatomy: dict[str, str], names: tuple[str, ...]
) -> None:
    known = ("stem.", *(f"blocks.{number}." for number in range(4)), "head.")
    seen = []
    for fedepth in (make(), make(make_task(model, anatomy=anatomy, epochs=2))):
        plan = plan_for(fedepth, RUNS)
        seen.append(inner(train(make_runner(fedepth), fedepth.setup(), plan).tensors))
    rename = dict(zip(known, names, strict=True))
    expected = {
        new + name.removeprefix(old): tensor
        for name, tensor in seen[0].items()
        for old, new in rename.items()
        if name.startswith(old)
    }
    same(seen[1], expected)


def test_a_list_of_layers_with_and_without_weights_is_trained() -> None:
    fedepth = make(make_task("depth_cases:perceptron"))
    plan = plan_for(fedepth, [(0, 2), (2, 3), (3, 4)])
    update = train(make_runner(fedepth), fedepth.setup(), plan)
    assert inner(update.tensors).keys() == fedepth.setup().tensors.keys()


# ---- whole runs


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    """A fleet of every kind: some blocks, all blocks in turn, one model and a part, two models."""
    fedepth = make(make_task())
    peak = whole_peak(fedepth)
    small, medium, mixed, rich = (int(share * peak) for share in (0.4, 0.6, 1.7, 1.95))
    return {
        "rounds": 3,
        "model": {"name": NARROW},
        "data": {"train_limit": 64, "test_limit": 20},
        "fleet": {
            "per_round": 4,
            "group": [
                {"count": 1, "memory": small, "name": "small"},
                {"count": 1, "memory": medium, "name": "medium"},
                {"count": 1, "memory": mixed, "name": "mixed"},
                {"count": 1, "memory": rich, "name": "rich"},
            ],
            "event": [{"round": 2, "upgrade": "small", "memory": rich}],
        },
        "method": {"name": "fedepth"},
        "recipe": {"batch": 8, "lr": 0.05, "max_steps": 2, "eval_batch": 20},
    }


def lines(path: Path) -> list[dict[str, Any]]:
    parsed = [json.loads(line) for line in (path / "updates.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in parsed]


def facts(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return all of a run that must not depend on how it came about."""
    state, _ = RunFolder(path).restore() or pytest.fail("no checkpoint")
    return {
        "result": {k: v for k, v in result.items() if k not in ("seconds", "run_dir")},
        "updates": lines(path),
        "devices": {number: sha256(tensors) for number, tensors in state.devices.items()},
    }


@pytest.fixture(scope="module")
def finished(
    tables: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("fedepth") / "run"
    with session.started(configs.from_dict(tables), path) as federation:
        return path, facts(federation.run(), path)


def test_a_run_keeps_all_budgets_and_refuses_nobody(finished: tuple[Path, dict[str, Any]]) -> None:
    path, found = finished
    assert not found["result"]["refused"]
    assert found["result"]["sizes"].keys() == {"full"}
    for line in lines(path):
        assert line["peak_bytes"] == line["predicted"] <= line["budget"]


def test_an_upgrade_gives_another_decomposition_from_its_round_on(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    path, found = finished
    sizes = {(line["device"], line["round"]): line["size"] for line in lines(path)}
    assert [sizes[0, number] for number in (1, 2, 3)] == ["blocks 4"] + ["blocks 1-4 + 1-4"] * 2
    assert {sizes[1, number] for number in (1, 2, 3)} == {"blocks 1 | 2 | 3-4"}
    assert sizes[2, 1] == "blocks 1-4 + 1 | 1-4 + 2-3 | 1-4 + 4"
    # Whoever has trained several models remembers all but one, the upgraded device too.
    assert found["devices"].keys() == {0, 2, 3}


def test_two_workers_a_stop_and_one_worker_give_the_same_bits(
    tables: dict[str, Any], finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    config = configs.from_dict({**tables, "engine": {"workers": 2}})
    with session.started(config, path) as federation:
        assert isinstance(federation.engine, PoolEngine)
        state, totals = federation.method.setup(), Totals()
        for number in range(2):
            state, totals, _ = federation.round(state, totals, number)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("workers = 2", "workers = 1"))
    with session.resumed(path) as federation:
        assert facts(federation.run(), path) == finished[1]


def test_frozen_blocks_of_texts_run_in_parts() -> None:
    method = FeDepth(text_task(batch=16))
    # A budget of nothing makes it save what it can.
    schedule = method.scheduler.run(0, 1, 2, ())
    (stage,) = schedule.stages
    assert isinstance(stage.work, Run)
    assert stage.work.blocks is not None
    assert stage.work.blocks.micro == 2
    plain = method.scheduler.run(None, 1, 2, ()).stages[0]
    assert method.peak(schedule.submodel, stage) <= method.peak(schedule.submodel, plain)
