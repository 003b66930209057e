"""The figures on docs/memory.md are what the code gives."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from sizewise import models
from sizewise.memory import accounting
from sizewise.memory.prediction import predict
from sizewise.runs.preparation import bytes_of_ratio, bytes_of_share
from sizewise.steps.optimizers import Sgd
from sizewise.steps.recipe import Recipe
from sizewise.training.task import ModelConfig, Task

PAGE = (Path(__file__).resolve().parents[2] / "docs/memory.md").read_text()
IMAGES = torch.empty(32, 3, 32, 32, device="meta")
MB = 10**6


def test_the_example_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block, printed) = re.findall(r"```(?:python|text)\n(.*?)```", PAGE, re.S)
    exec(compile(block, "document", "exec"), {})  # noqa: S102  (our own document)
    assert capsys.readouterr().out == printed


def test_figures_of_preresnet20() -> None:
    model = models.build("preresnet20", classes=10, image=(3, 32, 32))
    plain = predict(model, IMAGES).peak
    momentum = predict(model, IMAGES, optimizer=partial(Sgd, lr=0.1, momentum=0.9)).peak
    counted = accounting.summary(model, IMAGES).total
    text = " ".join(PAGE.split())
    assert (
        f"With momentum, which has a value for each parameter, it is {momentum / MB:.1f} MB" in text
    )
    assert (
        f"is {counted / 2**20:.2f} MiB, which is {counted / MB:.1f} MB; "
        f"a step takes {plain / MB:.1f} MB, {momentum / MB:.1f} with momentum" in text
    )
    task = Task(ModelConfig("preresnet20"), Recipe(batch=32), (3, 32, 32), 10)
    assert f"whole model | {bytes_of_ratio(task, 1 / 6) / MB:.1f} MB |" in text
    assert f"as FeDepth counts | {bytes_of_share(task, 1 / 6) / MB:.1f} MB |" in text


def test_figures_of_slt() -> None:
    found = [
        accounting.hooks(models.build("resnet20", classes=10, image=(3, 32, 32), width=w), IMAGES)
        for w in (1 / 8, 1 / 4, 1 / 2)
    ]
    first, second, third = (f"{size / MB:.1f}" for size in found)
    assert f"of the width are {first}, {second} and {third} MB" in " ".join(PAGE.split())
