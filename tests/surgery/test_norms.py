import pytest
import torch
from torch import nn

from sizewise.exchange.view import TensorSlice, whole
from sizewise.surgery import norms


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2))


STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize("policy", ["batch", "sbn"])
def test_policy_without_statistics_holds_none(policy: str) -> None:
    model = norms.prepare(network(), policy)
    assert not STATISTICS & set(model.state_dict())
    assert {"1.weight", "1.bias"} <= set(model.state_dict())


@pytest.mark.parametrize("policy", ["tracked", "per_width_stats", "per_submodel"])
def test_policy_with_statistics_holds_them(policy: str) -> None:
    assert set(norms.prepare(network(), policy).state_dict()) >= STATISTICS


def test_batch_policy_depends_on_the_batch_in_evaluation() -> None:
    model = norms.prepare(network(), "batch").eval()
    image = torch.randn(1, 3)
    first, second = (model(torch.cat([image, torch.randn(3, 3)]))[0] for _ in range(2))
    assert not torch.allclose(first, second)


def test_tracked_policy_does_not() -> None:
    model = norms.prepare(network(), "tracked")
    model(torch.randn(5, 3))
    model.eval()
    image = torch.randn(1, 3)
    first, second = (model(torch.cat([image, torch.randn(3, 3)]))[0] for _ in range(2))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("policy", "apart"),
    [
        ("batch", set()),
        ("sbn", set()),
        ("tracked", set()),
        ("per_width_stats", STATISTICS),
        ("per_submodel", STATISTICS | {"1.weight", "1.bias"}),
    ],
)
def test_what_is_kept_apart(policy: str, apart: set[str]) -> None:
    assert norms.kept_apart(network(), policy) == apart


def test_separated_tensors_point_at_whole_copies_of_their_size() -> None:
    view = {"w": TensorSlice("w", (slice(0, 1),)), "n": TensorSlice("n", (slice(0, 1),))}
    assert norms.separate(view, {"n"}, "half") == {"w": view["w"], "n": TensorSlice("n@half")}
    assert norms.separate(whole(["a"]), set(), "half") == whole(["a"])


def test_recalibration_is_the_mean_of_batch_statistics() -> None:
    model = norms.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)), "sbn")
    batches = [torch.randn(5, 2) * 3 + 1, torch.randn(4, 2), torch.randn(7, 2) - 2]
    model = norms.recalibrate(model, batches)
    mean = sum(batch.mean(0) for batch in batches) / 3
    variance = sum(batch.var(0) for batch in batches) / 3
    torch.testing.assert_close(model[0].running_mean, mean)
    torch.testing.assert_close(model[0].running_var, variance)
    # And evaluation uses them.
    x = torch.randn(1, 2)
    expected = (x - mean) / (variance + model[0].eps).sqrt()
    torch.testing.assert_close(model(x), model[1](expected))


def test_recalibration_by_hand() -> None:
    model = norms.prepare(nn.Sequential(nn.BatchNorm1d(1)), "sbn")
    norms.recalibrate(model, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [8.0]])])
    assert model[0].running_mean.tolist() == [3.5]
    assert model[0].running_var.tolist() == [5.0]  # (2 + 8) / 2, unbiased


def test_second_norm_sees_what_the_first_gives_in_training() -> None:
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    model = norms.prepare(nn.Sequential(first, nn.ReLU(), second), "sbn")
    batches = [torch.randn(6, 2), torch.randn(6, 2) * 2]
    norms.recalibrate(model, batches)
    hidden = []
    for batch in batches:
        normal = (batch - batch.mean(0)) / (batch.var(0, correction=0) + first.eps).sqrt()
        hidden.append(normal.relu())
    torch.testing.assert_close(second.running_mean, sum(h.mean(0) for h in hidden) / 2)


def test_recalibration_starts_afresh() -> None:
    model, batches = norms.prepare(network(), "sbn"), [torch.randn(5, 3)]
    once = norms.recalibrate(model, batches)[1].running_mean.clone()
    norms.recalibrate(model, [torch.randn(5, 3)])
    assert torch.equal(norms.recalibrate(model, batches)[1].running_mean, once)


def test_recalibration_draws_no_random_numbers() -> None:
    model = norms.prepare(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)), "sbn")
    batches = [torch.randn(5, 3)]
    before = torch.get_rng_state()
    norms.recalibrate(model, batches)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(model[1].running_mean, batches[0].mean(0))
    assert not any(module.training for module in model.modules())


def test_norm_without_affine_can_be_recalibrated() -> None:
    model = norms.prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), "sbn")
    batch = torch.randn(5, 2)
    expected = model[0](batch).mean(0)
    torch.testing.assert_close(norms.recalibrate(model, [batch])[1].running_mean, expected)
