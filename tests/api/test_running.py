"""Going on with a run, and what a finished one has."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sizewise
from commands import sizewise as command
from sizewise.data.dataset import Dataset
from sizewise.errors import CheckpointError, ConfigError

LIMITS = {"train_limit": 100, "test_limit": 20}
SMALL: dict[str, Any] = {"fleet": {"devices": 4, "per_round": 2}, "recipe": {"batch": 16}}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_more_rounds_are_those_of_a_longer_run(dataset: Dataset) -> None:
    rounds: list[int] = []
    long = sizewise.federate("linear", dataset, rounds=3, **SMALL)
    run = sizewise.federate("linear", dataset, rounds=2, out="run", **SMALL)
    more = sizewise.resume(
        "run", data=dataset, rounds=3, observe=lambda line, totals: rounds.append(line["round"])
    )
    assert rounds == [3]
    assert more.result["state_sha256"] == long.result["state_sha256"]
    assert [line["round"] for line in more.history] == [1, 2, 3]
    assert run.result["rounds"] == 2
    # One that is done is only read.
    assert sizewise.resume("run", data=dataset).result == more.result


def test_names_are_found_again() -> None:
    run = sizewise.federate("linear", rounds=1, out="run", data_options=LIMITS, **SMALL)
    assert sizewise.resume("run").result == run.result
    assert sizewise.resume("run", "linear", "digits").result == run.result


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        ("mlp", None, "the run's model is 'linear', not 'mlp'; leave it out"),
        (None, "mnist", "the run's data is 'digits', not 'mnist'; leave it out"),
        (nn.Linear(1, 1), None, "finds its model by the name 'linear'; leave model out"),
        (None, "dataset", "finds its data by the name 'digits'; leave data out"),
    ],
)
def test_what_a_run_finds_by_name_it_is_not_given(
    model: Any, data: Any, says: str, dataset: Dataset
) -> None:
    sizewise.federate("linear", rounds=1, out="run", data_options=LIMITS, **SMALL)
    with pytest.raises(ConfigError, match=says):
        sizewise.resume("run", model, dataset if data == "dataset" else data)


def test_other_data_is_refused(dataset: Dataset) -> None:
    sizewise.federate("linear", dataset, rounds=1, out="run", **SMALL)
    other = replace(dataset, train_labels=dataset.train_labels.flip(0))
    with pytest.raises(CheckpointError, match="the data is not what this run was started with"):
        sizewise.resume("run", data=other)
    with pytest.raises(CheckpointError, match="nowhere"):
        sizewise.resume("nowhere")


def test_callbacks_are_called_in_their_order(dataset: Dataset) -> None:
    said: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        return lambda line, totals: said.append((name, totals.rounds))

    named = {"observe": note("a"), "callbacks": [note("b"), note("c")]}
    sizewise.federate("linear", dataset, rounds=2, **named, **SMALL)
    assert said == [(name, rounds) for rounds in (1, 2) for name in "abc"]
    with pytest.raises(ConfigError, match=r"callbacks are functions .* 'x' came: write def"):
        sizewise.federate("linear", dataset, callbacks=["x"], **SMALL)  # type: ignore[list-item]


def trimmed(text: str) -> str:
    """Return what was printed, without the room around it."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def test_it_prints_as_the_command_line_shows_it(dataset: Dataset) -> None:
    run = sizewise.federate(
        "linear", rounds=1, out="run", data_options=LIMITS, budgets=["1MB"], **SMALL
    )
    assert repr(run) == trimmed(command("resume", "run").out)
    assert "1MB" in str(run)


def test_a_plan_is_that_of_the_command_line(dataset: Dataset, tmp_path: Path) -> None:
    budgets = ["1kB", "100kB", "1MB"]
    plan = sizewise.plan("mlp", budgets=budgets, method="heterofl", data_options=LIMITS)
    Path("config.toml").write_text(
        f'model.name = "mlp"\ndata = {{ train_limit = 100, test_limit = 20 }}\n'
        f'method.name = "heterofl"\nfleet.budgets = {budgets}\n'.replace("'", '"')
    )
    assert repr(plan) == trimmed(command("plan", "config.toml").out)
    assert [row["group"] for row in plan.rows] == budgets
    assert list(plan.frame()["budget"]) == [1000, 100_000, 1_000_000]
    assert plan.figure("plan.svg").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "plan.svg"}
    memory = sizewise.plan(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), dataset)
    assert memory.rows[0]["size"] == "full"
    with pytest.raises(ConfigError, match="plan takes no 'fleets'; did you mean 'fleet'"):
        sizewise.plan("mlp", fleets={})
