"""The optimisers are torch's, bit for bit, and cost less."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.recipe import Recipe


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "amsgrad"])
def test_steps_are_those_of_torch(name: str, momentum: float, weight_decay: float) -> None:
    theirs, ours = (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    recipe = Recipe(optimizer=name, momentum=momentum, weight_decay=weight_decay)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": weight_decay}
    options |= {"amsgrad": True} if name == "amsgrad" else {}
    options |= {"momentum": momentum} if name == "sgd" else {}
    optimizers = [
        kinds.get(name, torch.optim.Adam)(theirs.parameters(), **options),
        make_optimizer(recipe, list(ours.parameters()), 0.1),
    ]
    for step in range(4):
        inputs = torch.rand(6, 5)
        for module, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            # Some steps leave a layer without gradients: it must not move.
            (module if step % 2 else module[0])(inputs).square().sum().backward()
            optimizer.step()
    for expected, found in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "amsgrad"])
def test_an_optimizer_that_recalls_moments_goes_on_as_if_it_had_never_stopped(name: str) -> None:
    whole, parted = (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)) for _ in range(2))
    parted.load_state_dict(whole.state_dict())
    recipe = Recipe(optimizer=name)
    names = [name for name, _ in parted.named_parameters()]
    lasting = make_optimizer(recipe, list(whole.parameters()), 0.1)
    moments: dict[str, torch.Tensor] = {}
    for _ in range(3):
        fresh = make_optimizer(recipe, list(parted.parameters()), 0.1)
        fresh.recall(names, moments)
        for _ in range(2):
            inputs = torch.rand(6, 5)
            for module, optimizer in ((whole, lasting), (parted, fresh)):
                optimizer.zero_grad()
                module(inputs).square().sum().backward()
                optimizer.step()
        moments = fresh.moments(names)
    for expected, found in zip(whole.parameters(), parted.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_a_step_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from sizewise.steps.optimizers import Adam, Sgd
weights = torch.nn.Parameter(torch.ones(3))
weights.grad = torch.ones(3)
for optimizer in (Sgd([weights], 0.1, 0.9), Adam([weights])):
    optimizer.step()
    optimizer.zero_grad()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
