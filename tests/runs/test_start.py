"""What a run does before its first round: it must not import torch's compiler, over a second."""

import subprocess
import sys

import pytest

# As a run starts: the state, every class of devices, what is cut, and plan.json.
PLANNED = """
import sys
from sizewise import config
from sizewise.runs import preview
from sizewise.runs.federation import check_fleet
from sizewise.runs.preparation import checked, prepare

for method in METHODS:
    chosen = ["model.name=preresnet8", "data.train_limit=100", "data.test_limit=20"]
    chosen += [f"method.{option}" for option in method.split()]
    setting = prepare(config.load(None, chosen + ["fleet.budgets=['0.6MB', '1MB', '7MB']"]))
    check_fleet(setting.method, setting.fleet, setting.start)
    checked(setting.method)
    preview.rows_of(setting)
    print(method, "torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""

WIDTH = ("heterofl", "fjord", "fedrolex", "feddropout", "splitmix", "small", "nefl", "slt")
DEPTH = ("fedepth", "m-fedepth", "depthfl", "inclusivefl", "fedin", "allsmall")


@pytest.mark.parametrize("methods", [WIDTH, DEPTH], ids=["width", "depth"])
def test_planning_does_not_import_the_compiler(methods: tuple[str, ...]) -> None:
    named = [f"name={method}" for method in methods]
    assert _said(f"METHODS = {named!r}\n{PLANNED}") == [f"{name} False False" for name in named]


TRACED = """
import sys, torch
from sizewise import models
from sizewise.cutting import keep, shrink, trace, verify

for name in ("cnn", "preresnet8", "resnet18", "vit_tiny"):
    model = models.build(name, classes=3, image=(3, 32, 32))
    for loose in (False, True):
        channels = trace(model, torch.empty(2, 3, 32, 32), loose=loose)
        shrink(model, channels, keep(channels, 0.5))
        verify(model, channels, keep(channels, 0.5))
    print(name, "torch._dynamo" in sys.modules, "sympy" in sys.modules)
"""


def test_tracing_does_not_import_the_compiler() -> None:
    assert all(line.endswith(" False False") for line in _said(TRACED))


def _said(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()
