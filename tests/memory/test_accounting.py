import pytest
import torch
from torch import nn

from sizewise import models
from sizewise.memory.accounting import hooks, summary
from sizewise.memory.packing import pack_blocks

IMAGES = torch.empty(32, 3, 32, 32, device="meta")


@pytest.fixture(scope="module")
def preresnet20():
    return models.build("preresnet20", classes=10, image=(3, 32, 32))


def test_table_1_of_fedepth_to_the_last_digit(preresnet20):
    table = summary(preresnet20, IMAGES)
    printed = " ".join(f"{size / 2**20:.2f}" for size in (*table.blocks, table.total))
    assert printed == "20.02 20.02 20.02 14.05 10.07 10.07 7.21 5.28 5.28 116.04"


@pytest.mark.parametrize(
    ("ratio", "stages", "skipped"),
    [
        (1 / 8, [[4], [5], [6], [7, 8], [9]], [1, 2, 3]),
        (1 / 6, [[1], [2], [3], [4], [5, 6], [7, 8, 9]], []),
        (1 / 3, [[1, 2], [3, 4], [5, 6, 7, 8, 9]], []),
        (1 / 2, [[1, 2, 3], [4, 5, 6, 7, 8, 9]], []),
        (1, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], []),
    ],
)
def test_decompositions_of_fedepth(preresnet20, ratio, stages, skipped):
    table = summary(preresnet20, IMAGES)
    packing = pack_blocks(table.stage, len(table.blocks), ratio * table.total, tolerance=0.05)
    assert [[block + 1 for block in stage] for stage in packing.stages] == stages
    assert [block + 1 for block in packing.skipped] == skipped


def test_without_tolerance_a_sixth_does_not_hold_the_first_block(preresnet20):
    table = summary(preresnet20, IMAGES)
    assert pack_blocks(table.stage, 9, table.total / 6).skipped == (0, 1, 2)


def test_hooks_by_hand():
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    inputs = torch.empty(4, 3)
    first, second = 3 * 5 + 5, 5 * 2 + 2
    outputs = 4 * (5 + 5 + 2)
    assert hooks(module, inputs) == 4 * (outputs + 2 * (first + second))
    # A frozen first layer keeps its parameters only; the ReLU after it has no gradient either.
    assert hooks(module, inputs, ["2"]) == 4 * (4 * 2 + first + second + second)


def test_hooks_counts_the_sum_at_a_shortcut(preresnet20):
    last = hooks(preresnet20, IMAGES, ["blocks.8", "head"])
    parameters = sum(p.numel() for p in preresnet20.parameters())
    learning = sum(
        p.numel()
        for name, p in preresnet20.named_parameters()
        if name.startswith(("blocks.8", "head"))
    )
    # Norm, ReLU, conv, norm, ReLU, conv, sum; then the head's norm and ReLU. The shortcut hands on
    # what frozen blocks computed, which has no gradient.
    maps = 7 + 2
    outputs = 32 * (maps * 64 * 8 * 8 + 2 * 64 + 10)  # pooled, and flattened
    assert last == 4 * (outputs + parameters + learning)
    # With one more block, the last one has a shortcut that has one.
    more = hooks(preresnet20, IMAGES, ["blocks.7", "blocks.8", "head"])
    block = sum(p.numel() for p in preresnet20.get_submodule("blocks.7").parameters())
    assert more - last == 4 * (32 * 8 * 64 * 8 * 8 + block)


@pytest.mark.parametrize(("width", "limit"), [(0.125, 0.0120), (0.25, 0.0242), (0.5, 0.0486)])
def test_hooks_gives_the_budgets_of_slt(width, limit):
    model = models.build("resnet20", classes=10, image=(3, 32, 32), width=width)
    assert round(hooks(model, IMAGES) / 10**9, 4) == limit


class Add(nn.Module):
    def forward(self, a, b):
        return a + b


class Cat(nn.Module):
    def forward(self, a, b):
        return torch.cat([a, b], 1)


class First(nn.Module):
    """A shortcut: the first channels of a tensor, as many as another one has."""

    def forward(self, x, other):
        return x[:, : other.shape[1]]


class Modules(nn.Module):
    """Everything that happens is a module, as in SLT's public code."""

    def __init__(self, inner):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3), nn.Conv2d(8, inner, 3, padding=1)
        self.norm, self.relu, self.add = nn.BatchNorm2d(inner), nn.ReLU(), Add()
        self.shortcut, self.cat, self.pool = First(), Cat(), nn.AvgPool2d(2)
        self.flatten, self.linear = nn.Flatten(), nn.Linear(9 * (inner + 8), 10)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.conv(x))
        y = self.relu(self.add(y, self.shortcut(x, y)))
        return self.linear(self.flatten(self.pool(self.cat(y, x))))


@pytest.mark.parametrize("inner", [8, 5])
@pytest.mark.parametrize("frozen", [False, True])
def test_hooks_is_what_hooks_on_modules_see(inner, frozen):
    model, inputs = Modules(inner), torch.zeros(2, 3, 8, 8)
    model.stem.requires_grad_(not frozen)
    expected = hooks(model, inputs)
    seen = []
    for layer in model.children():
        layer.register_forward_hook(
            lambda _, __, out: seen.append(4 * out.numel() if out.requires_grad else 0)
        )
    model(inputs)
    assert len(seen) == 10
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert expected == sum(seen) + 4 * (sum(p.numel() for p in model.parameters()) + learning)


def test_slt_activations_dominate_and_width_is_nearly_linear():
    whole, quarter = (
        hooks(models.build("resnet20", classes=10, image=(3, 32, 32), width=width), IMAGES)
        for width in (1.0, 0.25)
    )
    assert quarter / whole == pytest.approx(0.25, abs=0.01)


def test_models_are_left_alone(preresnet20):
    before = {name: tensor.clone() for name, tensor in preresnet20.state_dict().items()}
    summary(preresnet20, IMAGES)
    hooks(preresnet20, IMAGES, ["head"])
    after = preresnet20.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.requires_grad for parameter in preresnet20.parameters())
