from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import devices_of, do_round
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import Partition
from sizewise.engines.device_runner import DeviceRunner
from sizewise.errors import BudgetTooSmall, ConfigError, ModelError, NoChannelLeft
from sizewise.exchange.plan import Update
from sizewise.fleet.devices import Device
from sizewise.methods.small import Small
from sizewise.methods.splitmix import (
    Bases,
    Deck,
    Ensemble,
    SplitMix,
    deck_of,
    draw_as_if_wide,
    first_bases,
)
from sizewise.runs.preparation import bytes_of_ratio
from sizewise.steps.step import backpropagate
from sizewise.training.task import Task

Tasks = Callable[..., Task]


def make(task: Task, **options: Any) -> SplitMix:
    return SplitMix(task, SplitMix.Options(**options))


def peak(method: SplitMix, bases: int) -> int:
    return method.peak(first_bases(bases, method.atom))


# ---- the deck


def test_every_turn_takes_the_next_card_and_others_at_random(make_task: Tasks) -> None:
    method = make(make_task(args={"hidden": [8]}), atom=0.25)
    state = method.setup()
    device = Device(0, "some", peak(method, 2))
    cards, others = Counter[int](), Counter[int]()
    for turn in range(400):
        chosen = method.plan(state, replace(device, turn=turn), turn).submodel.numbers
        assert len(chosen) == len(set(chosen)) == 2
        assert list(chosen) == sorted(chosen)
        others.update(chosen)
        alone = replace(device, turn=turn, memory=peak(method, 1))
        (card,) = method.plan(state, alone, turn).submodel.numbers
        assert card in chosen, "the next card is always included"
        cards[card] += 1
        if turn % 4 == 3:
            assert len(set(cards.values())) == 1, "the deck is used up before it is shuffled again"
    assert cards == dict.fromkeys(range(4), 100)
    assert all(150 < count < 250 for count in others.values())


def test_decks_are_shuffled_anew_and_depend_on_the_seed_alone(make_task: Tasks) -> None:
    def cards(seed: int) -> list[int]:
        method = make(make_task(args={"hidden": [8]}, seed=seed), atom=0.125)
        device = Device(0, "weak", peak(method, 1))
        state = method.setup()
        turns = (replace(device, turn=turn) for turn in range(32))
        return [method.plan(state, d, 0).submodel.numbers[0] for d in turns]

    first = cards(0)
    decks = [tuple(first[start : start + 8]) for start in range(0, 32, 8)]
    assert len(set(decks)) == 4
    assert all(sorted(deck) == list(range(8)) for deck in decks)
    assert first == cards(0)
    assert first != cards(1)


@pytest.mark.parametrize(("atom", "deck"), [(0.165, 6), (1 / 49, 49), (0.1, 10), (0.4, 2), (1, 1)])
def test_number_of_bases(atom: float, deck: int, make_task: Tasks) -> None:
    method = make(make_task(args={"hidden": [50]}), atom=atom)
    assert len(method.main.numbers) == deck_of(method.atom) == deck


# ---- quotas


def test_quota_by_bytes_is_all_that_fits(make_task: Tasks) -> None:
    method = make(make_task("cnn", {"layers": [8, 8]}), atom=0.125)
    state = method.setup()
    for bases in range(1, 9):
        needed = peak(method, bases)
        plan = method.plan(state, Device(0, "some", needed), 0)
        assert len(plan.submodel.numbers) == bases
        assert plan.predicted == plan.budget == needed
        if bases > 1:
            less = method.plan(state, Device(0, "some", needed - 1), 0)
            assert len(less.submodel.numbers) == bases - 1
    with pytest.raises(BudgetTooSmall, match=f"needs {peak(method, 1):,} bytes"):
        method.plan(state, Device(0, "weak", peak(method, 1) - 1), 0)
    assert method.quota(Device(0, "any")) == 8


@pytest.mark.parametrize(
    ("ratio", "quota"), [(1 / 6, 1), (1 / 3, 2), (0.5, 3), (1, 6), (2, 6), (0.01, 1)]
)
def test_quota_by_ratio_is_that_of_the_paper(ratio: float, quota: int, make_task: Tasks) -> None:
    method = make(make_task(args={"hidden": [12]}), atom=0.165, assign="ratio")
    device = Device(0, "some", 1, ratio=ratio)
    assert method.quota(device) == quota
    plan = method.plan(method.setup(), device, 0)
    assert plan.budget is None
    assert method.options.ignores_budgets


def test_quota_by_ratio_needs_ratios(make_task: Tasks) -> None:
    method = make(make_task(), atom=0.5, assign="ratio")
    with pytest.raises(ConfigError, match=r"needs a fleet that is given by ratios; use"):
        method.plan(method.setup(), Device(0, "some", 10**6), 0)


def test_atom_is_the_largest_that_the_smallest_budget_holds(make_task: Tasks) -> None:
    task = make_task(args={"hidden": [16, 16]}, shares=(0.25, 1))
    method = make(task)
    assert method.atom == 0.25
    assert deck_of(method.atom) == len(method.main.numbers) == 4
    assert method.setup().facts(Deck) == Deck(0.25)
    assert make(make_task()).atom == 1, "without limits there is one base, the model"
    assert make(replace(task, budgets=(10,))).atom == 1 / 16


def test_atom_is_never_so_small_that_a_layer_vanishes(make_task: Tasks) -> None:
    method = make(replace(make_task(args={"hidden": [6, 5]}), budgets=(10,)))
    assert method.atom == 0.2


# ---- bases


def test_bases_have_their_own_start_and_width(make_task: Tasks) -> None:
    method = make(make_task("cnn", {"layers": [8, 12]}), atom=0.25)
    tensors = method.setup().tensors
    assert tensors["bases.3.blocks.0.conv.weight"].shape == (3, 2, 3, 3)
    weights = [tensors[f"bases.{base}.stem.conv.weight"] for base in range(4)]
    assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 4
    again = make(make_task("cnn", {"layers": [8, 12]}), atom=0.25).setup().tensors
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)


def test_weights_are_drawn_as_if_layers_were_wide(make_task: Tasks) -> None:
    network = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Conv2d(40, 30, 3), nn.Linear(30, 10))
    before = [layer.weight.clone() for layer in network]
    first = network[0].bias.clone()
    nn.init.zeros_(network[2].bias)
    draw_as_if_wide(network, 0.25)
    assert torch.equal(network[0].weight, before[0]), "the input has its own width"
    assert torch.equal(network[0].bias, first)
    for layer, fan_in in ((network[1], 40 * 9), (network[2], 30)):
        bound = (0.25 / fan_in) ** 0.5  # kaiming_uniform's 1 / sqrt(fan in at full width)
        largest = float(layer.weight.detach().abs().max())
        assert 0.95 * bound < largest <= bound
    bound = (0.25 / 360) ** 0.5
    assert 0.5 * bound < float(network[1].bias.detach().abs().max()) <= bound
    assert not network[2].bias.any(), "what the model starts at 0 stays there"
    scaled = make(make_task(args={"hidden": [80, 80]}), atom=0.25).setup().tensors
    plain = (
        make(make_task(args={"hidden": [80, 80]}), atom=0.25, rescale_init=False).setup().tensors
    )
    name = "bases.1.blocks.0.linear.weight"
    assert float(scaled[name].abs().max()) <= (0.25 / 20) ** 0.5 < float(plain[name].abs().max())
    first = "bases.1.stem.linear.weight"
    assert torch.equal(scaled[first], plain[first])


@pytest.mark.parametrize("rescale", [True, False])
def test_convolutions_are_divided_by_the_atom_in_training(rescale: bool, make_task: Tasks) -> None:
    method = make(make_task("cnn", {"layers": [8]}), atom=0.25, rescale_layer=rescale)
    base = method.submodels.build(Bases((0,), method.atom)).get_submodule("bases.0")
    conv = base.get_submodule("stem.conv")
    images = torch.randn(2, 1, 4, 4)
    plain = F.conv2d(images, conv.weight, padding=1)  # type: ignore[arg-type]
    torch.testing.assert_close(conv(images), plain * 4 if rescale else plain)
    base.eval()
    assert torch.equal(conv(images), plain)


def test_hidden_linear_layers_are_divided_by_the_atom_in_training(make_task: Tasks) -> None:
    method = make(make_task(args={"hidden": [8, 8]}), atom=0.25)
    base = method.submodels.build(Bases((0,), method.atom)).get_submodule("bases.0")
    images, layers = torch.randn(2, 1, 4, 4), ("stem.linear", "blocks.0.linear", "head")
    x = images.flatten(1)
    for number, name in enumerate(layers):
        layer: Any = base.get_submodule(name)
        x = F.linear(x, layer.weight, layer.bias)
        x = x if number == 2 else (4 * x).relu()
    torch.testing.assert_close(base(images), x)


def rigid(*, classes: int, image: tuple[int, int, int]) -> nn.Module:
    """A model that cannot be cut: it has its number of channels by heart."""
    return Rigid(classes)


class Rigid(nn.Module):
    """Features in four groups of two."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        return self.head(x.view(len(x), 4, 2).softmax(1).reshape(-1, 8))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [SplitMix, Small])
def test_a_model_that_cannot_be_cut_is_refused_and_not_trained_whole(
    kind: Any, make_task: Tasks
) -> None:
    method = kind(replace(make_task(f"{__name__}:rigid", {}), budgets=(10,)))
    with pytest.raises(ModelError) as refused:
        method.setup()
    assert not isinstance(refused.value, NoChannelLeft)


def empty(*, classes: int, image: tuple[int, int, int], width: float = 1.0) -> nn.Module:
    """A model whose factory rounds to no units at all."""
    units = int(6 * width)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, units), nn.ReLU(), nn.Linear(units, classes))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_units_ends_the_search_for_an_atom(make_task: Tasks) -> None:
    task = replace(make_task(f"{__name__}:empty", {}), budgets=(10,))
    assert make(task).atom == 1 / 6
    with pytest.raises(NoChannelLeft, match=r"a layer without channels at width 0\.125; use a"):
        make(task, atom=0.125).setup()


def test_a_submodel_holds_the_bases_it_names(make_task: Tasks) -> None:
    method = make(make_task("cnn", {"layers": [8]}), atom=0.25)
    state = method.setup()
    module = method.submodels.filled(Bases((1, 3), method.atom), state)
    assert isinstance(module, Ensemble)
    for position, base in enumerate((1, 3)):
        found = module.bases[position].state_dict()
        assert all(torch.equal(t, state.tensors[f"bases.{base}.{n}"]) for n, t in found.items())


# ---- training


def test_bases_train_as_if_each_were_alone(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    method = make(make_task("cnn", {"layers": [8]}), atom=0.25)
    runner, state = DeviceRunner(method, dataset, partition), method.setup()
    plan = method.plan(state, Device(1, "any"), 0)
    together = runner.train(state, plan)
    assert isinstance(together, Update)
    losses = []
    for base in range(4):
        alone = runner.train(state, replace(plan, submodel=Bases((base,), method.atom)))
        assert isinstance(alone, Update)
        losses.append(alone.loss)
        for name, tensor in alone.tensors.items():
            expected = name.replace("bases.0.", f"bases.{base}.")
            assert torch.equal(together.tensors[expected], tensor)
    assert together.loss == pytest.approx(sum(losses) / 4), "the loss is that of one base"


def test_merge_is_the_mean_of_those_who_trained_a_base(
    make_task: Tasks, dataset: Dataset, partition: Partition
) -> None:
    task = make_task(args={"hidden": [8]}, shares=(0.25, 0.5, 0.75))
    method = make(task, atom=0.25, assign="ratio")
    state = method.setup()
    merged, updates = do_round(DeviceRunner(method, dataset, partition), state, 0)
    assert [len(update.plan.submodel.numbers) for update in updates] == [1, 2, 3]
    for base in range(4):
        name = f"bases.{base}.head.weight"
        sent = [
            (update.samples, update.tensors[f"bases.{chosen.index(base)}.head.weight"])
            for update in updates
            if base in (chosen := update.plan.submodel.numbers)
        ]
        if sent:
            mean = sum(n * tensor for n, tensor in sent) / sum(n for n, _ in sent)
            torch.testing.assert_close(merged.tensors[name], mean)
        else:
            assert torch.equal(merged.tensors[name], state.tensors[name])


def test_masking_ignores_classes_that_are_not_in_the_batch(make_task: Tasks) -> None:
    method = make(make_task(args={"hidden": [8]}), atom=0.5, mask_labels=True)
    module = method.submodels.filled(method.main, method.setup())
    loss = method.loss(method.main, method.task.stage(0), None)
    backpropagate(loss(module, torch.randn(3, 1, 4, 4), torch.tensor([0, 2, 0])))
    for base in range(2):
        gradient = module.get_parameter(f"bases.{base}.head.bias").grad
        assert gradient is not None
        assert (gradient != 0).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("atom", "counts"), [(1, [1]), (0.5, [1, 2]), (0.165, [1, 2, 4, 6]), (0.125, [1, 2, 4, 8])]
)
def test_ensembles_of_doubling_size_are_deployed(
    atom: float, counts: list[int], make_task: Tasks
) -> None:
    method = make(make_task(args={"hidden": [8]}), atom=atom)
    sizes = method.sizes(method.setup())
    assert [len(submodel.numbers) for submodel in sizes] == counts
    assert sizes[-1] == method.main


def test_budgets_of_the_fleet_are_those_of_narrow_models(make_task: Tasks) -> None:
    task = make_task("cnn", {"layers": [8, 16]}, shares=(0.5, 1))
    method = make(task, atom=0.5)
    assert bytes_of_ratio(task, 0.5) == task.budgets[0]
    assert [method.quota(device) for device in devices_of(task)] == [1, 2, 2]
