import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD

from sizewise import models
from sizewise.memory.meter import Meter, OutOfBudget
from sizewise.steps.step import training_step


def labels(batch):
    return torch.zeros(batch, dtype=torch.int64)


def test_meter_counts_storages_not_tensors():
    base = torch.zeros(10)
    with Meter() as meter:
        meter.track(base, [base[2:], {"again": base}])
        assert meter.live == 40
        views = base.view(2, 5).t(), base[3:]
        assert meter.live == 40
        doubled = base * 2
        assert meter.live == 80
        del doubled
        assert meter.live == 40
        base.resize_(30)
        assert meter.live == 120
        del base, views
        assert (meter.live, meter.peak) == (0, 120)


def test_meter_can_be_used_again_and_leaves_nothing_behind():
    meter, tensor = Meter(), torch.zeros(10)
    for _ in range(2):
        with meter:
            meter.track(tensor)
            kept = tensor + 1
            assert meter.live == 80
        assert (meter.live, meter.peak) == (0, 80)
        assert weakref.getweakrefcount(kept.untyped_storage()) == 0
    gone = weakref.ref(meter)
    del meter
    gc.collect()
    assert gone() is None


def test_meter_tracks_gradients_and_optimizer_state():
    module = nn.Linear(10, 10, bias=False)
    optimizer = SGD(module.parameters(), momentum=0.9)
    training_step(module, optimizer, torch.zeros(1, 10), labels(1))
    meter = Meter()
    meter.track(module, optimizer)
    assert meter.live == 3 * 400


def test_a_budget_of_exactly_the_peak_passes_and_one_byte_less_does_not():
    model = models.build("cnn", classes=10, image=(3, 32, 32))
    batch = torch.randn(4, 3, 32, 32), labels(4)
    optimizer = SGD(model.parameters(), momentum=0.9)

    def run(budget):
        with Meter(budget) as meter:
            meter.track(model, optimizer, *batch)
            training_step(model, optimizer, *batch)
        return meter.peak

    run(None)  # creates the optimiser's state
    peak = run(None)
    assert run(peak) == peak
    with pytest.raises(OutOfBudget) as caught:
        run(peak - 1)
    error = caught.value
    assert (error.live, error.budget) == (peak, peak - 1)
    assert error.dtype == "float32"
    assert len(error.shape) == 4
    assert error.layer.startswith("blocks.") or error.layer.startswith("stem.")
    assert error.layer.endswith("(backward)")
    assert f"{peak:,} bytes" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301
    assert run(peak) == peak  # the process is fine and the next step works


class Greedy(nn.Module):
    """Allocates more at run time than its tensors declare."""

    def forward(self, x):
        return x + torch.zeros(100_000).sum()


def test_a_planted_overrun_names_the_layer():
    module = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), Greedy()), nn.Linear(6, 4))
    optimizer = SGD(module.parameters())
    meter = Meter(10_000)
    meter.track(module)
    with pytest.raises(OutOfBudget) as caught, meter:
        training_step(module, optimizer, torch.zeros(3, 6), labels(3))
    assert caught.value.layer == "1.1"
    assert caught.value.shape == (100_000,)
    assert "aten.zeros" in caught.value.op or "aten.empty" in caught.value.op
    assert not torch.nn.modules.module._global_forward_hooks
    with pytest.raises(OutOfBudget, match="no layer"):
        Meter(100).track(module)
