"""The end of a round: callbacks, stopping by validation, and the best round that is kept."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import assert_one_sentence, sizewise
from sizewise import config as configs
from sizewise.errors import CheckpointError, ConfigError
from sizewise.exchange.state import sha256
from sizewise.runs import deployment, session
from sizewise.runs.benefit import Benefit, Validation
from sizewise.runs.federation import judged
from sizewise.runs.folder import Best, RunFolder, Totals

TABLES: dict[str, Any] = {
    "rounds": 8,
    "model": {"name": "linear"},
    "data": {"train_limit": 100, "test_limit": 40, "validation": 0.2},
    "fleet": {"devices": 4, "per_round": 2},
    "engine": {"save_every": 3},
}

Play = Callable[[Sequence[float]], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return what makes runs measure these validation scores, one a round."""

    def chosen(scores: Sequence[float]) -> None:
        def measured(self: Validation, *given: object) -> Benefit:
            return Benefit(scores[int(given[-1])], ())  # type: ignore[call-overload]

        monkeypatch.setattr(Validation, "measured", measured)

    return chosen


def run(path: Path, *observers: Any, **tables: Any) -> dict[str, Any]:
    with session.started(configs.from_dict({**TABLES, **tables}), path) as federation:
        return federation.run(*observers)


def resume(path: Path, *overrides: str) -> dict[str, Any]:
    with session.resumed(path, overrides=overrides) as federation:
        return federation.run()


# ---- stopping


def test_totals_by_hand() -> None:
    totals = Totals(accuracy=0.4, sizes={"full": 0.4})
    first = judged(totals, Benefit(0.5, ()), 2, 0.1)
    assert (first.best, first.since) == (Best(2, 0.5, 0.4, {"full": 0.4}), 0)
    # 0.6 is not above 0.5 + 0.1.
    second = judged(first, Benefit(0.6, ()), 4, 0.1)
    assert (second.best, second.since) == (first.best, 1)
    third = judged(second, Benefit(0.7, ()), 6, 0.1)
    assert (third.best, third.since) == (Best(6, 0.7, 0.4, {"full": 0.4}), 0)
    assert third.validation == {"score": 0.7}


SCORES = [0.1, 0.5, 0.4, 0.5, 0.6, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("stop", "rounds", "best"),
    [
        ({"patience": 1}, 3, 2),
        ({"patience": 2}, 4, 2),
        ({"patience": 3}, 8, 5),
        ({"patience": 3, "min_delta": 0.15}, 5, 2),
        ({"patience": 4}, 8, 5),
        ({}, 8, 5),
    ],
)
def test_a_run_ends_when_patience_does(
    stop: dict[str, Any], rounds: int, best: int, play: Play, tmp_path: Path
) -> None:
    play(SCORES)
    result = run(tmp_path / "run", stop=stop)
    assert (result["rounds"], result["best_round"]["round"]) == (rounds, best)
    assert result["best_round"]["score"] == SCORES[best - 1]
    lines = [json.loads(x) for x in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert [line["validation"]["score"] for line in lines] == SCORES[:rounds]
    assert result["best_round"]["accuracy"] == lines[best - 1]["accuracy"]
    if rounds == 8:
        assert result["stopped"] is None  # Patience may be at its end as well: nothing is left out.
    else:
        row = f"{stop['patience']} evaluations in a row" if rounds > 3 else "an evaluation"
        said = f"{row} without a better validation score than that of round {best}"
        assert result["stopped"] == said
    # It is over, also for those who resume it.
    assert resume(tmp_path / "run") == result


def test_only_evaluations_are_counted(play: Play, tmp_path: Path) -> None:
    play([9, 0.5, 9, 0.4, 9, 0.3, 9, 0.2])
    result = run(tmp_path / "run", stop={"patience": 2}, recipe={"eval_every": 2})
    assert (result["rounds"], result["best_round"]["round"]) == (6, 2)


def test_more_patience_goes_on_to_the_same_bits(play: Play, tmp_path: Path) -> None:
    play(SCORES)
    whole = run(tmp_path / "whole")
    assert run(tmp_path / "run", stop={"patience": 1})["rounds"] == 3
    longer = resume(tmp_path / "run", "stop.patience=4")
    differing = ("seconds", "run_dir")
    assert all(longer[key] == whole[key] for key in whole if key not in differing)
    finals = [(tmp_path / name / "best.safetensors").read_bytes() for name in ("run", "whole")]
    assert finals[0] == finals[1]


def test_the_best_round_is_what_a_run_of_so_many_rounds_ends_with(
    play: Play, tmp_path: Path
) -> None:
    play(SCORES)
    run(tmp_path / "long")
    short = run(tmp_path / "short", rounds=5)
    state, totals = RunFolder(tmp_path / "long").best() or pytest.fail("nothing is kept")
    assert (sha256(state.tensors), totals.rounds) == (short["state_sha256"], 5)
    files = sorted(path.name for path in (tmp_path / "long/checkpoints").glob("best-*"))
    assert files == ["best-000005.safetensors"]


def test_stopping_needs_something_to_go_by(tmp_path: Path) -> None:
    answer = sizewise("run", "--set", "stop.patience=3", "--out", tmp_path / "run")
    assert_one_sentence(answer, "set data.validation to a share such as 0.2")
    assert not (tmp_path / "run").exists()
    for table, words in (
        ({"patience": 0}, "stop.patience must be at least 1, not 0"),
        ({"min_delta": -0.1}, r"stop.min_delta must not be negative"),
    ):
        with pytest.raises(ConfigError, match=words):
            configs.from_dict({**TABLES, "stop": table})


# ---- callbacks


def test_callbacks_see_each_round_and_any_of_them_ends_the_run(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []

    def note(line: Any, totals: Totals) -> str:
        seen.append((line["round"], totals.rounds, "note"))
        return "not True, so it means nothing"

    def enough(line: Any, totals: Totals) -> bool:
        seen.append((line["round"], totals.rounds, "enough"))
        return totals.rounds == 2

    result = run(tmp_path / "run", enough, note)
    assert seen == [(1, 1, "enough"), (1, 1, "note"), (2, 2, "enough"), (2, 2, "note")]
    assert (result["rounds"], result["stopped"]) == (2, "a callback asked for it")
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
    # Nobody asks in the next session, so it goes on.
    whole = run(tmp_path / "whole")
    assert resume(tmp_path / "run")["state_sha256"] == whole["state_sha256"]


def test_what_a_callback_raises_comes_out_and_the_run_can_go_on(tmp_path: Path) -> None:
    def fail(line: Any, totals: Totals) -> None:
        if totals.rounds == 4:
            raise LookupError("of the user's own")

    with pytest.raises(LookupError, match="of the user's own"):
        run(tmp_path / "run", fail)
    assert not (tmp_path / "run/result.json").exists()
    whole, resumed = run(tmp_path / "whole"), resume(tmp_path / "run")
    differing = ("seconds", "run_dir")
    assert all(resumed[key] == whole[key] for key in whole if key not in differing)


# ---- without validation, and exports


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "run"
    result = run(path, rounds=1, data={"train_limit": 100, "test_limit": 40})
    assert (result["validation"], result["best_round"], result["stopped"]) == (None, None, None)
    return path


def test_a_run_without_validation_has_nothing_new(plain: Path) -> None:
    names = {path.name for path in plain.rglob("*")}
    assert not [name for name in names if "best" in name or name == "devices.json"]
    assert "validation" not in json.loads((plain / "history.jsonl").read_text())


def test_it_has_no_best_round_to_export(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no best round, as no device validates"):
        deployment.export(plain, tmp_path / "m.safetensors", size="full", best=True)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_the_best_round_is_exported(method: str, play: Play, tmp_path: Path) -> None:
    """Also where the model is a device's own, whose files come and go."""
    play(SCORES)
    run(tmp_path / "long", method={"name": method})
    run(tmp_path / "short", method={"name": method}, rounds=5)
    size = {"fedavg": "full", "local": "device 1"}[method]
    flags = {"long": ["--best"], "short": []}
    for name, more in flags.items():
        out = tmp_path / f"{name}.safetensors"
        answer = sizewise("export", tmp_path / name, "--size", size, "--out", out, *more, "--json")
        assert answer.code == 0, answer.err
        assert json.loads(answer.out)["round"] == 5
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in flags]
    assert files[0] == files[1]
