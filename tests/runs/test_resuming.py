"""A run goes on with the config it was started with, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_resume import Crash, Writes, writes  # noqa: F401  (a fixture)

from commands import assert_one_sentence, sizewise
from sizewise import config
from sizewise.errors import CheckpointError
from sizewise.exchange import checkpoint
from sizewise.runs import resuming, session
from sizewise.steps.recipe import Recipe

TABLES: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "linear"},
    "data": {"train_limit": 120, "test_limit": 40},
    "fleet": {"devices": 4, "per_round": 3},
}


def train(path: Path, **tables: Any) -> dict[str, Any]:
    with session.started(config.from_dict({**TABLES, **tables}), path) as federation:
        return federation.run()


def resume(path: Path, *overrides: str) -> dict[str, Any]:
    with session.resumed(path, overrides=overrides) as federation:
        return federation.run()


def edit(path: Path, before: str, after: str) -> None:
    text = (path / "config.toml").read_text()
    assert before in text
    (path / "config.toml").write_text(text.replace(before, after))


def changes(path: Path) -> list[dict[str, Any]]:
    record = json.loads((path / "config.record.json").read_text())
    assert record["before"] is None
    return [{k: v for k, v in change.items() if k != "time"} for change in record["changes"]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(tmp_path / "run")
    return tmp_path / "run"


def test_an_edited_config_is_refused_by_name_and_nothing_changes(run: Path) -> None:
    edit(run, "lr = 0.1", "lr = 0.05")
    edit(run, "seed = 0", "seed = 1")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    answer = sizewise("resume", run)
    assert_one_sentence(answer, "recipe.lr was 0.1 and is 0.05")
    assert "seed was 0 and is 1" in answer.err
    assert "put it back, or start a new run" in answer.err
    answer = sizewise("export", run, "--size", "full", "--out", run.parent / "m.safetensors")
    assert_one_sentence(answer, "seed was 0 and is 1")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    edit(run, "lr = 0.05", "lr = 0.1")
    edit(run, "seed = 1", "seed = 0")
    resume(run)


def test_more_rounds_by_hand_must_be_meant(run: Path) -> None:
    edit(run, "rounds = 2", "rounds = 3")
    assert_one_sentence(sizewise("resume", run), "rounds was 2 and is 3")
    assert resume(run, "rounds=3")["rounds"] == 3


def test_comments_and_order_are_no_edit(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text("# mine\n" + text.replace(" = ", "  =  "))
    assert resume(run)["rounds"] == 2


def test_going_on_longer_is_the_longer_run(run: Path, tmp_path: Path) -> None:
    expected = train(tmp_path / "whole", rounds=5)
    first = json.loads((run / "result.json").read_text())
    answer = sizewise("resume", run, "--set", "rounds=5", "--json")
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    assert result["state_sha256"] == expected["state_sha256"] != first["state_sha256"]
    assert result["rounds"] == 5
    assert "rounds was 2 and is 5\n" in answer.err
    assert "recipe.schedule" not in answer.err
    assert config.load(run / "config.toml") == config.load(tmp_path / "whole/config.toml")
    assert changes(run) == [{"key": "rounds", "before": 2, "after": 5, "round": 2}]
    assert resume(run) == result
    assert len(changes(run)) == 1


@pytest.mark.parametrize("recipe", [{"schedule": "cosine"}, {"schedule": "steps"}])
def test_a_schedule_that_depends_on_the_rounds_is_told(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    train(tmp_path / "run", recipe=recipe)
    answer = sizewise("resume", tmp_path / "run", "--set", "rounds=4")
    assert answer.code == 0
    assert "from round 3 on, lr is that of a run of 4; before, of one of 2" in answer.err


@pytest.mark.parametrize(
    "recipe",
    [Recipe(), Recipe(schedule="exponential"), Recipe(schedule="steps", milestones=(2.0, 3.0))],
)
def test_a_schedule_that_does_not_is_not(recipe: Recipe) -> None:
    change = resuming.Change("rounds", 2, 4, 2, "now")
    assert resuming.sentences([change], recipe) == ["rounds was 2 and is 4"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds=1", "rounds was 2 and is 1"),
        ("recipe.lr=0.2", "recipe.lr was 0.1 and is 0.2"),
        ("method.name=fedprox", 'method.name was "fedavg" and is "fedprox"'),
        ("engine.together=4", "engine.together was 0 and is 4"),
        ("data.train_limit=60", "data.train_limit was 120 and is 60"),
        ('fleet.budgets=["1MB"]', "fleet.budgets was [] and is [1000000]"),
        ("recipe.lrr=1", "unknown key 'recipe.lrr'"),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_what_would_mix_two_runs_cannot_be_set(
    override: str, message: str, recorded: bool, run: Path
) -> None:
    if not recorded:
        (run / "config.record.json").unlink()
    assert_one_sentence(sizewise("resume", run, "--set", override), message)
    assert (run / "result.json").exists()


def test_how_a_run_is_carried_out_may_change(run: Path, tmp_path: Path) -> None:
    expected = train(tmp_path / "whole", rounds=4)
    (tmp_path / "data").mkdir()
    edit(run, "save_every = 1", "save_every = 2")
    sets = ("rounds=4", "engine.workers=2", f"data.root={tmp_path / 'data'}")
    assert resume(run, *sets)["state_sha256"] == expected["state_sha256"]
    assert [change["key"] for change in changes(run)] == [
        *("rounds", "engine.workers", "engine.save_every", "data.root")
    ]


def test_folders_of_earlier_versions_go_on_and_are_guarded_from_then_on(run: Path) -> None:
    (run / "config.record.json").unlink()
    assert resume(run, "rounds=3")["rounds"] == 3
    assert changes(run) == [{"key": "rounds", "before": 2, "after": 3, "round": 2}]
    edit(run, "lr = 0.1", "lr = 0.05")
    with pytest.raises(CheckpointError, match=r"recipe.lr was 0.1 and is 0.05"):
        resume(run)


def test_a_damaged_record_is_named(run: Path) -> None:
    (run / "config.record.json").write_text("{")
    assert_one_sentence(sizewise("resume", run), "config.record.json' is damaged")


def test_a_crash_while_a_change_is_recorded(run: Path, writes: Writes) -> None:  # noqa: F811
    """At whatever write it comes, the run goes on, by the same command or by a plain resume."""
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    crash_at, ended = 0, False
    while not ended:
        crash_at += 1
        for overrides in ((), ("rounds=3",)):
            for path in run.rglob("*"):
                if path.is_file() and path not in files:
                    path.unlink()
            for path, content in files.items():
                path.write_bytes(content)
            writes.count, writes.crash_at = 0, crash_at
            try:
                resuming.go_on(run, ["rounds=3"])
                ended = True
            except Crash:
                pass
            writes.crash_at = -1
            chosen, _ = resuming.go_on(run, overrides)
            assert chosen.rounds in ((2, 3) if not overrides else (3,))
            assert config.load(run / "config.toml") == chosen
            assert len(changes(run)) == chosen.rounds - 2
    assert crash_at > 6


def test_slt_goes_on_with_its_last_step(tmp_path: Path) -> None:
    tables = {"method": {"name": "slt"}, "model": {"name": "mlp", "args": {"hidden": [8, 8]}}}
    train(tmp_path / "run", **tables, rounds=4)
    assert resume(tmp_path / "run", "rounds=5")["rounds"] == 5


def test_rounds_done(tmp_path: Path) -> None:
    assert checkpoint.rounds_done(tmp_path) == 0
    (tmp_path / "round-000012.safetensors").touch()
    assert checkpoint.rounds_done(tmp_path) == 12
