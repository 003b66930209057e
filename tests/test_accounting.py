import pytest
import torch
from torch import nn

from sizewise import models
from sizewise.accounting import hooks, summary
from sizewise.packing import pack_blocks

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
    maps = 7 + 2  # norm, ReLU, conv, norm, ReLU, conv, sum; then the head's norm and ReLU
    outputs = 32 * (maps * 64 * 8 * 8 + 64 + 10)
    assert last == 4 * (outputs + parameters + learning)


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
