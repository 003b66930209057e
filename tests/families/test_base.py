from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from sizewise.data.augment import Transform
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import BudgetTooSmall
from sizewise.exchange.plan import Plan, Refusal, TrainingStage, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import cut
from sizewise.families.base import Method
from sizewise.families.submodels import Width
from sizewise.fleet.devices import Device
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def drowsy(classes: int) -> nn.Module:
    """A model with dropout."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, classes))


def bare(classes: int) -> nn.Module:
    """A model whose norm has statistics but no parameters."""
    norm = nn.BatchNorm1d(4, affine=False)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), norm, nn.Linear(4, classes))


@pytest.fixture
def runner_of(dataset: Dataset, partition: Partition) -> Callable[[Method], DeviceRunner]:
    return lambda method: DeviceRunner(method, dataset, partition)


def trained(runner: DeviceRunner, state: State, device: int, round_index: int = 0) -> Update:
    plan = runner.method.plan(state, Device(device, "any"), round_index)
    update = runner.train(state, plan)
    assert isinstance(update, Update)
    return update


def same(left: Update, right: Update) -> bool:
    return left.tensors.keys() == right.tensors.keys() and all(
        torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors
    )


def test_setup_depends_on_the_seed_alone(make_task: Tasks) -> None:
    first = Method(make_task()).setup().tensors
    torch.manual_seed(99)
    again, other = Method(make_task()).setup().tensors, Method(make_task(seed=1)).setup().tensors
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_plan_follows_recipe_and_schedule(make_task: Tasks) -> None:
    method = Method(make_task(schedule="exponential", decay=0.5, lr=0.8, epochs=3))
    plan = method.plan(method.setup(), Device(7, "phone", 10**6), 2)
    assert (plan.device, plan.round, plan.group, plan.submodel) == (7, 2, "phone", Width())
    assert plan.stages == (TrainingStage(lr=0.2, epochs=3),)
    assert plan.budget == 10**6
    assert plan.predicted == method.peak(method.main, plan.stages[0])


def test_budget_of_one_byte_less_is_too_small(make_task: Tasks) -> None:
    method = Method(make_task())
    state = method.setup()
    needed = method.plan(state, Device(0, "any"), 0).predicted
    assert needed is not None
    assert method.plan(state, Device(0, "any", needed), 0).budget == needed
    with pytest.raises(BudgetTooSmall, match=f"full model needs {needed:,} bytes") as caught:
        method.plan(state, Device(0, "any", needed - 1), 0)
    assert (caught.value.budget, caught.value.needed) == (needed - 1, needed)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("recipe", [{}, {"proximal": 0.1}, {"optimizer": "adam"}, {"clip": 1.0}])
def test_metered_peak_is_the_predicted_one(
    recipe: dict[str, object], make_task: Tasks, runner_of: Callable[[Method], DeviceRunner]
) -> None:
    runner = runner_of(Method(make_task("cnn", **recipe)))
    update = trained(runner, runner.method.setup(), 2)
    assert update.peak_bytes == update.plan.predicted


def test_training_is_a_pure_function(
    make_task: Tasks, runner_of: Callable[[Method], DeviceRunner]
) -> None:
    runner, state = runner_of(Method(make_task("cnn"))), Method(make_task("cnn")).setup()
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    first = trained(runner, state, 1)
    trained(runner, state, 2)
    torch.manual_seed(5)
    assert same(first, trained(runner, state, 1))
    assert same(first, trained(runner_of(Method(make_task("cnn"))), state, 1))
    assert not same(first, trained(runner, state, 1, round_index=1))
    assert all(torch.equal(state.tensors[name], before[name]) for name in before)


def test_dropout_is_reproducible_and_leaves_global_state_alone(
    make_task: Tasks, runner_of: Callable[[Method], DeviceRunner]
) -> None:
    task = make_task(f"{__name__}:drowsy", {})
    runner = runner_of(Method(task))
    state = runner.method.setup()
    generator = torch.get_rng_state()
    first = trained(runner, state, 1)
    assert torch.equal(torch.get_rng_state(), generator)
    torch.rand(7)
    other = runner_of(Method(task))
    trained(other, state, 0)
    assert same(first, trained(other, state, 1))


def test_update_says_what_was_done(
    make_task: Tasks, runner_of: Callable[[Method], DeviceRunner]
) -> None:
    runner = runner_of(Method(make_task(epochs=2)))
    update = trained(runner, runner.method.setup(), 1)
    assert (update.samples, update.steps) == (10, 2 * 3)
    assert 0.1 < update.loss < 5
    assert update.seconds > 0
    assert update.device_state == {}


def test_device_without_data_is_refused_with_its_reason(make_task: Tasks, dataset: Dataset) -> None:
    empty = Partition(torch.arange(5), torch.tensor([0, 5, 5]))
    method = Method(make_task())
    state = method.setup()
    plan = method.plan(state, Device(1, "any"), 4)
    outcome = DeviceRunner(method, dataset, empty).train(state, plan)
    assert outcome == Refusal(1, 4, "any", "it holds no training data")


@pytest.mark.parametrize(("weighting", "weights"), [("samples", (5, 15)), ("equal", (1, 1))])
def test_merge_weighs_updates_by_samples_or_equally(
    weighting: str,
    weights: tuple[int, int],
    make_task: Tasks,
    runner_of: Callable[[Method], DeviceRunner],
) -> None:
    runner = runner_of(Method(make_task(weighting=weighting)))
    state = runner.method.setup()
    first, second = (trained(runner, state, device) for device in (0, 2))
    merged = runner.method.merge(state, iter([first, second]))
    for name in state.tensors:
        total = weights[0] * first.tensors[name] + weights[1] * second.tensors[name]
        torch.testing.assert_close(merged.tensors[name], total / sum(weights))
    assert state.tensors.keys() == merged.tensors.keys()


def test_merge_of_nothing_changes_nothing(make_task: Tasks) -> None:
    for server in ("fedavg", "fedadam"):
        method = Method(make_task(server=server))
        state = method.setup()
        merged = method.merge(state, [])
        assert all(merged.tensors[name] is state.tensors[name] for name in state.tensors)


@pytest.mark.parametrize("server", ["fedavg", "fedadam"])
def test_what_a_method_keeps_on_the_server_survives_a_merge(
    make_task: Tasks, runner_of: Callable[[Method], DeviceRunner], server: str
) -> None:
    method = Method(make_task(server=server))
    state = replace(method.setup(), server_state={"store/a": torch.ones(3)})
    merged = method.merge(state, [trained(runner_of(method), state, 0)])
    assert torch.equal(merged.server_state["store/a"], torch.ones(3))


def test_only_parameters_pass_through_the_server_optimiser(make_task: Tasks) -> None:
    method = Method(make_task("cnn", norm="tracked"))
    state = method.setup()
    statistics = {name for name in state.tensors if "running" in name or "num_batches" in name}
    assert statistics
    assert set(method.submodels.parameters(state, method.main)) == set(state.tensors) - statistics


@pytest.mark.parametrize(
    ("norm", "apart"),
    [
        ("tracked", set()),
        ("per_width_stats", {"running_mean", "running_var", "num_batches_tracked"}),
        ("per_submodel", {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}),
    ],
)
def test_norms_kept_apart_live_under_their_size(
    norm: str, apart: set[str], make_task: Tasks, runner_of: Callable[[Method], DeviceRunner]
) -> None:
    runner = runner_of(Method(make_task("cnn", norm=norm)))
    state = runner.method.setup()
    named = {name for name in state.tensors if name.endswith("@full")}
    assert named == {f"{m}.norm.{t}@full" for m in ("stem", "blocks.0") for t in apart}
    merged = runner.method.merge(state, [trained(runner, state, 0)])
    assert merged.tensors.keys() == state.tensors.keys()
    changed = {n for n in named if not torch.equal(merged.tensors[n], state.tensors[n])}
    assert changed == named
    assert set(cut(state.tensors, runner.method.submodels.view(Width()))) == set(
        runner.method.submodels.module(Width()).state_dict()
    )


def test_statistics_without_parameters_are_merged_too(
    make_task: Tasks, runner_of: Callable[[Method], DeviceRunner]
) -> None:
    runner = runner_of(Method(make_task(f"{__name__}:bare", {}, norm="tracked")))
    state = runner.method.setup()
    merged = runner.method.merge(state, [trained(runner, state, 1)])
    assert not torch.equal(merged.tensors["2.running_mean"], state.tensors["2.running_mean"])


def test_deployed_model_holds_the_servers_tensors(make_task: Tasks) -> None:
    method = Method(make_task())
    state = State({name: tensor + 1 for name, tensor in method.setup().tensors.items()})
    ((size, model),) = method.deploy(state).items()
    assert size == "full"
    assert model.owner is None
    found = model.fill().state_dict()
    assert all(torch.equal(found[name], state.tensors[name]) for name in state.tensors)


def test_the_figure_to_show_is_the_last_size(make_task: Tasks) -> None:
    assert Method(make_task()).summary_metric({"small": 0.1, "full": 0.7}) == 0.7


def test_static_norms_are_recalibrated_on_all_training_data(
    make_task: Tasks, runner_of: Callable[[Method], DeviceRunner], dataset: Dataset
) -> None:
    # End to end: the score is that of a model with by-hand statistics.
    runner = runner_of(Method(make_task("cnn", norm="sbn", eval_batch=10)))
    state = runner.method.setup()
    model = Method(make_task("cnn", norm="tracked")).submodels.module(Width())
    model.load_state_dict(dict(state.tensors), strict=False)
    model.train()
    transform = Transform("none", dataset.mean, dataset.std)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        for images in dataset.train_inputs.split(10):
            model(transform(images, None))
        logits = model.eval()(transform(dataset.test_inputs, None))
    loss = nn.functional.cross_entropy(logits, dataset.test_labels, reduction="sum")
    scores = runner.evaluate(state, "full", None)
    assert sum(score.loss_sum for score in scores) == pytest.approx(loss.item(), rel=1e-5)
    # The working copy is not left with statistics: training goes on without them.
    assert set(runner.method.submodels.module(Width()).state_dict()) == set(state.tensors)


def test_flops_are_those_of_the_stage(make_task: Tasks) -> None:
    method = Method(make_task(args={"hidden": [6]}))
    head = method.flops_per_sample(Width(), TrainingStage(0.1, 1, ("head",)))
    everything = method.flops_per_sample(Width(), TrainingStage(0.1, 1))
    assert head == 2 * (16 * 6 + 6 * 3) + 2 * 6 * 3
    assert everything == head + 2 * 16 * 6 + 2 * 6 * 3


def test_method_remembers_nothing_about_a_run(
    make_task: Tasks, runner_of: Callable[[Method], DeviceRunner]
) -> None:
    used, fresh = runner_of(Method(make_task("cnn"))), runner_of(Method(make_task("cnn")))
    state = used.method.setup()
    for device in (0, 1, 2):
        used.method.merge(state, [trained(used, state, device)])
    plan = fresh.method.plan(state, Device(2, "any"), 1)
    assert isinstance(plan, Plan)
    assert plan == used.method.plan(state, Device(2, "any"), 1)
    assert same(trained(used, state, 2, 1), trained(fresh, state, 2, 1))
