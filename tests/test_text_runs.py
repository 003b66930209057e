"""Texts through the whole system: every method, every kind of label, the command line."""

from typing import Any

import pytest

from sizewise import catalogue, methods
from sizewise.engines.local import LocalEngine
from sizewise.fleet import Device
from sizewise.plan import Update
from sizewise.task import Task
from text_cases import text_site, text_task

# SplitMix and SLT take a model apart by its norms and convolutions; see their pages.
METHODS = catalogue.names("methods")


def run(name: str, task: Task, rounds: int = 1) -> dict[str, float]:
    """Train three devices and return the score of each size."""
    method = methods.find(name)(task)
    site = text_site(method)
    state = method.setup()
    for number in range(rounds):
        devices = [Device(i, "any", budget) for i, budget in enumerate(task.budgets)]
        plans = [method.plan(state, device, number) for device in devices]
        outcomes = [site.train(state, plan) for plan in plans]
        for plan, outcome in zip(plans, outcomes, strict=True):
            assert isinstance(outcome, Update), outcome
            assert outcome.peak_bytes is not None
            assert outcome.peak_bytes <= (plan.predicted or 0)
        state = method.merge(state, outcomes)
    scores = LocalEngine(site).evaluate(state)
    return {size: score.values(task.metric)[0] for size, score in scores.items()}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_an_encoder(name: str) -> None:
    scores = run(name, text_task())
    assert scores
    assert all(0 <= value <= 1 for value in scores.values())


@pytest.mark.parametrize("target", ["tags", "score"])
@pytest.mark.parametrize("name", ["fedavg", "fedepth", "depthfl", "heterofl", "inclusivefl"])
def test_tags_and_scores(name: str, target: Any) -> None:
    scores = run(name, text_task(target))
    assert all(-1 <= value <= 1 for value in scores.values())


@pytest.mark.parametrize("target", ["class", "tags", "score"])
def test_training_learns(target: Any) -> None:
    task = text_task(target, rounds=40, optimizer="adam", lr=0.01, epochs=5)
    assert run("fedavg", task, rounds=8)["full"] > 0.8
