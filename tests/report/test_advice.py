"""`sizewise advise`: what it predicts is what a run meters, and it says why it advises what."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sizewise import config as configs
from sizewise import methods
from sizewise.report import advice, tables
from sizewise.report.advice import Advice, Fit
from sizewise.runs import leaderboard, session
from sizewise.runs.preparation import Setting
from test_cli import assert_one_sentence, sizewise

TABLES: dict[str, Any] = {
    "rounds": 3,
    "seed": 4,
    "model": {"name": "cnn", "args": {"layers": [4, 8]}},
    "data": {"train_limit": 300, "test_limit": 50, "partition": "iid"},
    "fleet": {
        "devices": 9,
        "per_round": 4,
        "budgets": ["60kB", "150kB", "1MB"],
        "profiles": ["pi-zero-2w", "pi-4", "pi-5"],
    },
    "method": {"name": "heterofl", "widths": [0.25, 0.5, 1.0]},
    "recipe": {"batch": 16},
}


@pytest.fixture(scope="module")
def advised() -> Advice:
    return advice.advise(TABLES, patience=600)


def test_every_method_is_looked_at(advised: Advice) -> None:
    said = {fit.method for fit in advised.fits} | set(advised.refused)
    assert {name.partition(",")[0] for name in said} == set(methods.names())
    assert not advised.left
    assert {fit.name for fit in advised.fits} & set(advised.refused) == set()


@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fedepth, levers", "local", "nefl"])
def test_a_run_meters_what_was_predicted(name: str, advised: Advice, tmp_path: Path) -> None:
    (fit,) = (fit for fit in advised.fits if fit.name == name)
    method = TABLES["method"] if fit.method == "heterofl" else {"name": fit.method}
    recipe = {**TABLES["recipe"], "levers": fit.levers}
    config = configs.from_dict({**TABLES, "method": method, "recipe": recipe})
    with session.started(config, tmp_path / "run") as federation:
        result = federation.run()
    assert fit.sent * 3 == result["bytes_up"] + result["bytes_down"]
    for row in fit.classes:
        peak = result["peak_bytes"][row["group"]]
        assert (peak is None) == (row["refused"] is not None)
        if name == "nefl":  # It draws submodels, the largest of which was predicted.
            assert (peak or 0) <= row["predicted"]
        else:
            assert peak in (None, row["predicted"])
    lines = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert sum(line["device_seconds"] for line in lines) / 3 == pytest.approx(fit.seconds, rel=0.05)


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether plans were made of sketches, one by one; the smallest model counts as large."""
    made = []

    def planned(name: str, setting: Setting) -> Fit:
        found = was(name, setting)
        made.append(setting.method.task.sketched)
        return found

    was = advice._planned
    monkeypatch.setattr(advice, "_planned", planned)
    monkeypatch.setattr(advice, "LARGE", 0)
    return made


def test_plans_of_models_without_weights_are_the_same(
    advised: Advice, sketched: list[bool]
) -> None:
    assert advice.advise(TABLES, patience=600) == advised
    assert sketched.count(True) > 40


def test_of_a_model_that_looks_at_its_weights_too(sketched: list[bool]) -> None:
    model = {"name": f"{__name__}:deciding", "args": {}}
    mine = {**TABLES, "model": model, "method": {}}
    found = advice.advise(mine, patience=600)
    assert not any(sketched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "LARGE", 1 << 40)
        assert advice.advise(mine, patience=600) == found


class Deciding(nn.Module):
    """A model that runs a further layer if a weight says so."""

    def __init__(self) -> None:
        super().__init__()
        self.often = nn.Parameter(torch.ones(1))
        self.more, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.last(self.more(x) if float(self.often) > 0.5 else x)


def deciding(**_: Any) -> Deciding:
    return Deciding()


def test_options_stay_with_their_method(advised: Advice) -> None:
    (mine,) = (fit for fit in advised.fits if fit.name == "heterofl")
    assert {row["size"] for row in mine.classes} <= {"width 0.25", "width 0.5", "full"}


def test_levers_that_change_nothing_are_not_shown(advised: Advice) -> None:
    assert "alllarge" in {fit.name for fit in advised.fits}
    assert "alllarge, levers" not in {fit.name for fit in advised.fits}


def fit(name: str, accuracy: float, reach: float, seconds: float | None, sent: float) -> Fit:
    there = leaderboard.Standing(name, name, "none", accuracy, None, 1, 1, 1, 1, 1, (accuracy,))
    return Fit(name, name, "none", reach, 1, sent, 1, seconds, (), 0.0, there)


def found(*fits: Fit, interval: float | None) -> Advice:
    rows = tuple(fit.elsewhere for fit in fits if fit.elsewhere is not None)
    rows = tuple(sorted(rows, key=lambda row: -row.accuracy))
    shape = leaderboard.Shape(((1.0, 1.0),), 0.5)
    board = leaderboard.Board("t", "Task", "even", "even", False, shape, rows, interval)
    return Advice(1, board, 0.0, fits, {})


def test_the_best_that_reaches_the_devices_is_advised() -> None:
    far, near = fit("far", 0.9, 0.5, 1.0, 1), fit("near", 0.8, 1.0, 1.0, 1)
    chosen = found(far, near, interval=None)
    assert chosen.recommended is near
    assert "it is number 2 with 80.0 %" in chosen.reason()


def test_what_would_leave_much_of_the_model_untrained_is_not_advised() -> None:
    best, next_best = fit("best", 0.9, 1.0, 1.0, 1), fit("next", 0.8, 1.0, 1.0, 1)
    assert found(best, next_best, interval=None).recommended is best
    assert found(replace(best, untrained=0.2), next_best, interval=None).recommended is next_best


def test_of_those_alike_the_quickest_is_advised() -> None:
    slow, quick = fit("slow", 0.9, 1.0, 9.0, 1), fit("quick", 0.89, 1.0, 1.0, 2)
    assert found(slow, quick, interval=None).recommended is slow
    assert found(slow, quick, interval=0.02).recommended is quick
    assert "not told apart from the first" in found(slow, quick, interval=0.02).reason()
    # However uncertain the board is, what seems far better is taken.
    far = fit("far", 0.87, 1.0, 1.0, 2)
    assert found(slow, far, interval=0.05).recommended is slow
    unknown = [replace(one, seconds=None) for one in (slow, quick)]
    assert found(*unknown, interval=0.02).recommended is unknown[0]
    partial = replace(quick, reach=0.95)
    assert found(slow, partial, interval=0.02).recommended is slow


def test_the_reason_says_with_what_settings() -> None:
    plain = fit("one", 0.9, 1.0, 1.0, 1)
    assert plain.elsewhere is not None
    assert "first with 90.0 %; here" in found(plain, interval=None).reason()
    settings = ("recipe.optimizer=adamw", "recipe.lr=0.001")
    tuned = replace(plain, elsewhere=replace(plain.elsewhere, settings=settings))
    expected = "first with 90.0 % (recipe.optimizer=adamw, recipe.lr=0.001); here"
    assert expected in found(tuned, interval=None).reason()


def test_what_was_never_measured_is_not_advised() -> None:
    unseen = replace(fit("new", 0.9, 1.0, 1.0, 1), elsewhere=None)
    board = found(fit("old", 0.9, 1.0, 1.0, 1), interval=None).board
    advised = Advice(1, board, 0.0, (unseen,), {})
    assert advised.recommended is None
    assert "No method of the leaderboard" in advised.reason()


def test_the_command(tmp_path: Path, advised: Advice, capsys: pytest.CaptureFixture[str]) -> None:
    tables.show_advice(advised)
    shown = capsys.readouterr().out
    assert advised.reason() in shown
    assert advised.reason().startswith("Use ")
    assert all(one.name in shown for one in advised.fits)
    assert json.loads(json.dumps(advised.to_dict()))["whole"] == advised.whole
    # Out of patience after the first method; the rest is named.
    sets = ("model.name=linear", "data.train_limit=200", "data.test_limit=40")
    more = [word for text in sets for word in ("--set", text)]
    answer = sizewise("advise", "--patience", "0", "--json", *more)
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert len(said["methods"]) == 1
    assert said["not_looked_at"]
    assert not list(tmp_path.iterdir())


def test_a_bad_config_is_one_sentence() -> None:
    assert_one_sentence(
        sizewise("advise", "--set", "model.name=nosuch"), "no model is called 'nosuch'"
    )
