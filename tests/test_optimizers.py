"""The optimisers are torch's, bit for bit, and cost less."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from sizewise.optimizers import make_optimizer
from sizewise.recipe import Recipe


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_steps_are_those_of_torch(name: str, momentum: float, weight_decay: float) -> None:
    theirs, ours = (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    recipe = Recipe(optimizer=name, momentum=momentum, weight_decay=weight_decay)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options = {"lr": 0.1, "weight_decay": weight_decay}
    options |= {"momentum": momentum} if name == "sgd" else {}
    optimizers = [
        kinds[name](theirs.parameters(), **options),
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


def test_a_step_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from sizewise.optimizers import Adam, Sgd
weights = torch.nn.Parameter(torch.ones(3))
weights.grad = torch.ones(3)
for optimizer in (Sgd([weights], 0.1, 0.9), Adam([weights])):
    optimizer.step()
    optimizer.zero_grad()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
