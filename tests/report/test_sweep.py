"""Sweeps: every combination of values is a row, named after them."""

from pathlib import Path
from typing import Any

import pytest

from sizewise import config
from sizewise.errors import ConfigError
from sizewise.report import comparison, sweep


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("recipe.lr=0.01,0.1", {"recipe.lr": [0.01, 0.1]}),
        ("recipe.lr = 0.01, 1", {"recipe.lr": [0.01, 1]}),
        ("data.partition=iid,dirichlet", {"data.partition": ["iid", "dirichlet"]}),
        ('fleet.budgets=["1MB"],["2MB","3MB"]', {"fleet.budgets": [["1MB"], ["2MB", "3MB"]]}),
        ("recipe.nesterov=true,false", {"recipe.nesterov": [True, False]}),
        ("model.args.name=a,1", {"model.args.name": ["a", 1]}),
    ],
)
def test_options_are_read_like_overrides(option: str, found: dict[str, Any]) -> None:
    assert sweep.read([option]) == found


@pytest.mark.parametrize("option", ["recipe.lr", "=1,2", "recipe.lr=", "recipe.lr= "])
def test_an_option_without_values_is_one_sentence(option: str) -> None:
    with pytest.raises(ConfigError, match=r"--vary takes a key and its values, such as recipe\.lr"):
        sweep.read([option])


def test_a_key_twice_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"--vary recipe\.lr is given twice"):
        sweep.read(["recipe.lr=1", "recipe.lr=2"])


def test_every_combination_is_a_row() -> None:
    base = {"method": {"name": "a"}, "recipe": {"lr": 9.0, "batch": 3}}
    grid = {"recipe.lr": [0.01, 0.1], "fleet.budgets": [["1MB"], None]}
    found = sweep.rows({"a": base, "b": {}}, grid)
    assert list(found) == [
        f"{row} lr={lr} budgets={budgets}"
        for row in "ab"
        for lr in (0.01, 0.1)
        for budgets in ('["1MB"]', "null")
    ]
    first = found['a lr=0.01 budgets=["1MB"]']
    assert first["recipe"] == {"lr": 0.01, "batch": 3}
    assert first["fleet"] == {"budgets": ["1MB"]}
    assert base["recipe"] == {"lr": 9.0, "batch": 3}
    assert sweep.rows({"a": base}, {}) == {"a": base}


def test_keys_of_one_last_word_are_written_out() -> None:
    found = sweep.rows({"a": {}}, {"model.args.width": [1], "method.width": [2]})
    assert list(found) == ["a model.args.width=1 method.width=2"]


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ({"seed": [1, 2]}, "seeds says what to compare; leave 'seed' out of vary"),
        ({"method.name": ["a"]}, "methods says what to compare"),
        ({"recipe.lr": []}, "'recipe.lr' takes a list of values to try, not"),
        ({"recipe.lr": 0.1}, "takes a list of values to try, not 0.1"),
        ({"recipe.lr": "0.1"}, "takes a list of values to try, not '0.1'"),
        ({"rounds.lr": [0.1]}, "vary 'rounds.lr': 'rounds' is not a table"),
    ],
)
def test_what_cannot_be_varied(grid: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sweep.rows({"a": {"rounds": 3}}, grid)


def test_two_rows_never_share_a_folder(tmp_path: Path) -> None:
    rows = sweep.rows({"fedavg": {}}, {"data.name": ["a b", "a_b"]})
    says = "'fedavg name=a b' and 'fedavg name=a_b' would share the folder 'fedavg_name=a_b-0'"
    with pytest.raises(ConfigError, match=says):
        comparison.jobs(rows, [0], tmp_path)


def test_values_of_a_config() -> None:
    chosen = config.from_dict({"recipe": {"lr": 0.5}, "fleet": {"budgets": ["1kB"]}})
    keys = ["recipe.lr", "fleet.budgets", "rounds.no", "recipe.no"]
    assert list(sweep.values(chosen, keys).values()) == [0.5, [1000], None, None]
