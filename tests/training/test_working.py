import pytest
import torch
from torch import nn

from sizewise.exchange.plan import TrainingStage
from sizewise.training.working import WorkingCopy


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def test_loading_copies_by_name_and_needs_every_tensor() -> None:
    copy, other = WorkingCopy(network()), network()
    model = copy.load(other.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert model[0].weight.data_ptr() != other[0].weight.data_ptr()
    with pytest.raises(KeyError, match=r"0\.weight"):
        copy.load({})


def test_buffers_that_are_not_saved_are_put_back() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("count", torch.zeros(1), persistent=False)
    copy = WorkingCopy(model)
    model.get_buffer("count").add_(3)
    copy.load(model.state_dict())
    assert model.get_buffer("count").item() == 0


def test_what_the_owner_froze_is_taken_out_of_every_stage() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    copy = WorkingCopy(model)
    everything = ("0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    assert copy.actual(TrainingStage(0.1, 1)).trainable == everything
    assert copy.actual(TrainingStage(0.1, 1, ("0",))).trainable == ("0.bias",)
    model.requires_grad_(False)
    assert copy.actual(TrainingStage(0.1, 1)).trainable == everything, (
        "later freezing is a stage's own"
    )


def test_a_stage_stays_as_it_is_when_nothing_is_frozen() -> None:
    stage = TrainingStage(0.1, 1, ("2",))
    assert WorkingCopy(network()).actual(stage) is stage
