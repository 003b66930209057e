import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sizewise.exchange.server_optimizers import apply
from sizewise.steps.recipe import Recipe

ADAPTIVE = ["fedadagrad", "fedadam", "fedadamw", "fedyogi"]


def two_steps(server: str, **numbers: Any) -> list[float]:
    """Start at 1; devices propose a step of +2, then of -1. Return the weight after each."""
    recipe = Recipe(server=server, **numbers)
    w, memory = torch.tensor([1.0]), {}
    weights = []
    for step in (2.0, -1.0):
        tensors, memory = apply(recipe, {"w": w}, {"w": w + step}, memory, {"w": True})
        w = tensors["w"]
        weights.append(w.item())
    return weights


def test_fedavg_takes_the_mean_as_it_is() -> None:
    merged = {"w": torch.randn(3)}
    tensors, memory = apply(Recipe(), {"w": torch.randn(3)}, merged, {}, {"w": True})
    assert tensors["w"] is merged["w"]
    assert memory == {}


def test_fedavg_with_half_a_step() -> None:
    assert two_steps("fedavg", server_lr=0.5) == [2.0, 1.5]


def test_fedavgm_by_hand() -> None:
    # m = 2, then 0.5 * 2 - 1 = 0.
    assert two_steps("fedavgm", server_momentum=0.5) == [3.0, 3.0]
    assert two_steps("fedavgm", server_momentum=0.5, server_lr=0.25) == [1.5, 1.5]


NUMBERS = {"server_lr": 0.1, "server_momentum": 0.5, "server_beta2": 0.75, "server_tau": 0.01}
# m = 0.5 * 2 = 1, then 0.5 * 1 - 0.5 * 1 = 0; so let the second step be seen with b1 = 0 as well.


@pytest.mark.parametrize(
    ("server", "second_moments"),
    [
        ("fedadagrad", (4.0, 5.0)),
        ("fedadam", (1.0, 0.75 * 1 + 0.25 * 1)),
        # v1 = 0 + 0.25 * 4; then v - d^2 = 0, so v stays.
        ("fedyogi", (1.0, 1.0)),
    ],
)
def test_adaptive_servers_by_hand(server: str, second_moments: tuple[float, float]) -> None:
    first, second = (math.sqrt(v) + 0.01 for v in second_moments)
    after = 1 + 0.1 * 1 / first
    assert two_steps(server, **NUMBERS) == pytest.approx([after, after])
    after = 1 + 0.1 * 2 / first
    expected = [after, after - 0.1 * 1 / second]
    assert two_steps(server, **{**NUMBERS, "server_momentum": 0.0}) == pytest.approx(expected)


def test_yogi_moves_its_second_moment_by_the_sign() -> None:
    recipe = Recipe(server="fedyogi", server_beta2=0.75, server_momentum=0.0)
    old, up = {"w": torch.zeros(2)}, {"w": torch.tensor([2.0, 0.5])}
    _, memory = apply(recipe, old, up, {"second/w": torch.tensor([1.0, 1.0])}, {"w": True})
    # d^2 = 4 > v: v + 0.25 * 4. d^2 = 0.25 < v: v - 0.25 * 0.25.
    assert memory["second/w"].tolist() == [2.0, 0.9375]


def test_adam_has_no_bias_correction() -> None:
    (after, _) = two_steps("fedadam", server_lr=1.0, server_tau=1e-9)
    assert after == pytest.approx(1 + 0.2 / math.sqrt(0.01 * 4))


def test_adamw_by_hand() -> None:
    # m = 1, v = 1, corrected by 1 - 0.5 and 1 - 0.75: 2 / (sqrt(4) + 0.01); 0.2 of 1 decays, times
    # 0.1. Then m = 0.5 - 0.5 = 0: only the decay is left.
    numbers = {**NUMBERS, "server_weight_decay": 0.2}
    after = 1 * (1 - 0.1 * 0.2) + 0.1 * 2 / 2.01
    assert two_steps("fedadamw", **numbers) == pytest.approx([after, after * (1 - 0.1 * 0.2)])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_that_of_torch(decay: float) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    betas = (0.9, 0.999)
    optimizer = torch.optim.AdamW([weight], 0.02, betas, 1e-6, weight_decay=decay)
    recipe = Recipe(
        server="fedadamw",
        server_lr=0.02,
        server_momentum=betas[0],
        server_beta2=betas[1],
        server_tau=1e-6,
        server_weight_decay=decay,
    )
    tensors, memory = {"w": weight.detach().clone()}, {}
    for _ in range(20):
        step = torch.randn(3, 4)
        weight.grad = -step  # A step that devices propose goes down the gradient.
        optimizer.step()
        merged = {"w": tensors["w"] + step}
        tensors, memory = apply(recipe, tensors, merged, memory, {"w": True})
        torch.testing.assert_close(tensors["w"], weight.detach())


def test_adamw_counts_the_steps_of_each_entry() -> None:
    recipe = Recipe(server="fedadamw", server_lr=1.0, server_tau=1e-9)
    tensors, memory = {"w": torch.zeros(2)}, {}
    for covered in (torch.tensor([True, False]), torch.tensor([True, True])):
        merged = {"w": tensors["w"] + 3.0 * covered}
        tensors, memory = apply(recipe, tensors, merged, memory, {"w": covered})
    # An entry's first step is of length eta, whichever round it is in.
    assert tensors["w"].tolist() == pytest.approx([2.0, 1.0], rel=1e-5)
    assert memory["steps/w"].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("server", ["fedavgm", *ADAPTIVE])
def test_buffers_take_the_merged_value(server: str) -> None:
    old = {"w": torch.zeros(2), "var": torch.ones(2)}
    merged = {"w": torch.ones(2), "var": torch.full((2,), 0.25)}
    tensors, memory = apply(Recipe(server=server), old, merged, {}, {"w": True})
    assert tensors["var"] is merged["var"]
    assert {name.partition("/")[2] for name in memory} == {"w"}


@pytest.mark.parametrize("server", ["fedavgm", *ADAPTIVE])
def test_tensor_that_nobody_trained_rests_with_its_moments(server: str) -> None:
    recipe = Recipe(server=server)
    old = {"w": torch.zeros(2), "frozen": torch.ones(2)}
    everything = dict.fromkeys(old, True)
    tensors, memory = apply(recipe, old, {k: v + 1 for k, v in old.items()}, {}, everything)
    merged = {**tensors, "w": tensors["w"] + 1}
    after, moments = apply(recipe, tensors, merged, memory, {"w": True, "frozen": False})
    assert after["frozen"] is tensors["frozen"]
    for name in moments:
        assert (moments[name] is memory[name]) == name.endswith("frozen")


@pytest.mark.parametrize("server", ["fedavgm", *ADAPTIVE])
def test_entries_that_nobody_trained_rest_with_their_moments(server: str) -> None:
    recipe = Recipe(server=server)
    old = {"w": torch.zeros(2)}
    tensors, memory = apply(recipe, old, {"w": torch.ones(2)}, {}, {"w": True})
    first_only = torch.tensor([True, False])
    merged = {"w": tensors["w"] + first_only}
    after, moments = apply(recipe, tensors, merged, memory, {"w": first_only})
    assert (after["w"] == tensors["w"]).tolist() == [False, True]
    for name, moment in moments.items():
        assert moment[1] == memory[name][1]
        assert moment[0] != memory[name][0]


@pytest.mark.parametrize("server", ["fedavg", "fedavgm", *ADAPTIVE])
def test_nothing_is_changed_in_place(server: str) -> None:
    recipe = Recipe(server=server, server_lr=0.5)
    old, merged = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    memory: dict[str, Tensor] = {}
    for _ in range(2):
        before = {name: tensor.clone() for name, tensor in memory.items()}
        _, after = apply(recipe, old, merged, memory, {"w": True})
        assert all(torch.equal(memory[name], before[name]) for name in before)
        memory = after
    assert old["w"].tolist() == [0, 0]
    assert merged["w"].tolist() == [1, 1]


def as_written(
    recipe: Recipe, w: Tensor, d: Tensor, m: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step as the module's docstring has it, each term a tensor of its own."""
    b1, b2 = recipe.server_momentum, recipe.server_beta2
    if recipe.server == "fedavgm":
        m = b1 * m + d
        return w + recipe.server_lr * m, m, v
    m = b1 * m + (1 - b1) * d
    if recipe.server == "fedadagrad":
        v = v + d**2
    elif recipe.server == "fedadam":
        v = b2 * v + (1 - b2) * d**2
    else:
        v = v - (1 - b2) * d**2 * torch.sign(v - d**2)
    return w + recipe.server_lr * (m / (v.sqrt() + recipe.server_tau)), m, v


@pytest.mark.parametrize("server", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_steps_have_the_bits_of_the_written_rule(server: str) -> None:
    recipe = Recipe(
        server=server, server_lr=0.037, server_momentum=0.83, server_beta2=0.97, server_tau=1e-3
    )
    w = torch.randn(31, 7)
    tensors, memory = {"w": w}, {}
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for _ in range(4):
        merged = {"w": tensors["w"] + 0.1 * torch.randn_like(w)}
        w, m, v = as_written(recipe, w, merged["w"] - tensors["w"], m, v)
        tensors, memory = apply(recipe, tensors, merged, memory, {"w": True})
        assert torch.equal(tensors["w"], w)
        assert torch.equal(memory["first/w"], m)
