"""Comparisons from Python: those of the command line, also of what is in memory."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from torch import nn

import sizewise
from commands import assert_one_sentence
from commands import sizewise as command
from sizewise.data.dataset import Dataset
from sizewise.errors import ConfigError, ModelError, NothingMerged

SMALL: dict[str, Any] = {
    "rounds": 1,
    "fleet": {"devices": 4, "per_round": 2},
    "recipe": {"lr": 0.05, "batch": 4},
}
CONFIG = """
rounds = 1
model.name = "linear"
data = { train_limit = 100, test_limit = 20 }
fleet = { devices = 4, per_round = 2 }
recipe = { lr = 0.05, batch = 4 }
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def perceptron(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, classes))


def test_names_give_what_the_command_line_gives() -> None:
    """Also a sweep: the second, from Python, finds the runs of the first and adds one."""
    Path("config.toml").write_text(CONFIG)
    options = ("--methods", "fedavg", "--vary", "recipe.lr=0.01,0.1", "--out", "out", "--json")
    answer = command("compare", "config.toml", *options)
    assert answer.code == 0, answer.err
    told = json.loads(answer.out.splitlines()[-1])
    assert [run["varied"] for run in told["runs"]] == [{"recipe.lr": 0.01}, {"recipe.lr": 0.1}]
    assert [run["row"] for run in told["runs"]] == ["fedavg lr=0.01", "fedavg lr=0.1"]
    before = Path("out/fedavg_lr=0.1-0/result.json").stat().st_mtime_ns
    limits = {"train_limit": 100, "test_limit": 20}
    found = sizewise.compare(
        "linear",
        methods=["fedavg"],
        vary={"recipe.lr": [0.1, 0.2]},
        out="out",
        data_options=limits,
        **SMALL,
    )
    assert Path("out/fedavg_lr=0.1-0/result.json").stat().st_mtime_ns == before
    same = found.runs["fedavg lr=0.1", 0].result
    assert same["state_sha256"] == told["runs"][1]["result"]["state_sha256"]
    # And what a process of its own did is what this process does.
    recipe = {**SMALL, "recipe": {"lr": 0.2, "batch": 4}}
    alone = sizewise.federate("linear", data_options=limits, **recipe)
    other = found.runs["fedavg lr=0.2", 0].result
    assert other["state_sha256"] == alone.result["state_sha256"]


@pytest.fixture
def found(dataset: Dataset) -> sizewise.Comparison:
    return sizewise.compare(
        perceptron, dataset, methods=["fedavg", "heterofl"], seeds=[0, 1], budgets="1MB", **SMALL
    )


def test_what_is_in_memory_is_run_here(found: sizewise.Comparison, dataset: Dataset) -> None:
    assert list(found.runs) == [
        *(("fedavg", 0), ("heterofl", 0), ("fedavg", 1), ("heterofl", 1)),
    ]
    run = found.runs["heterofl", 1]
    alone = sizewise.federate(
        perceptron, dataset, method="heterofl", seed=1, budgets="1MB", **SMALL
    )
    assert run.result["state_sha256"] == alone.result["state_sha256"]
    assert run.model()(dataset.transform()(dataset.test_inputs, None)).shape == (12, 3)
    assert {path.name for path in found.folder.iterdir()} >= {"table.md", "report.html"}


def test_it_is_a_table_everywhere(found: sizewise.Comparison) -> None:
    heads, *rows = (found.folder / "table.md").read_text().split("\n\n")[0].splitlines()
    cells = [cell.strip() for cell in heads.strip("|").split("|")]
    html = found._repr_html_()
    assert re.findall(r"<th>(.*?)</th>", html) == cells
    for row in rows[1:]:
        shown = [cell.strip() for cell in row.strip("|").split("|")]
        assert "".join(f"<td>{cell}</td>" for cell in shown) in html
        assert any(all(cell in line for cell in shown) for line in repr(found).splitlines())
    found.frame().to_csv("frame.csv", index=False)
    stored = pd.read_csv(found.folder / "table.csv")
    pd.testing.assert_frame_equal(pd.read_csv("frame.csv"), stored)
    runs = found.frame(each_run=True)
    assert list(runs["row"]) == ["fedavg", "heterofl"] * 2
    assert list(runs["seed"]) == [0, 0, 1, 1]
    assert list(runs["accuracy"]) == [run.accuracy for run in found.runs.values()]
    means = {row.name: row.mean for row in found.rows}
    best = max(means, key=means.__getitem__)
    assert found.best.accuracy == max(r.accuracy for (n, _), r in found.runs.items() if n == best)
    assert "fedavg" in found.report("page.html").read_text()


def test_what_is_done_is_not_run_again(found: sizewise.Comparison, dataset: Dataset) -> None:
    times = {path: path.stat().st_mtime_ns for path in found.folder.glob("*/result.json")}
    more = sizewise.compare(
        perceptron,
        dataset,
        methods=["small", "fedavg"],
        seeds=[0, 1],
        budgets="1MB",
        **SMALL,
    )
    assert more.folder == found.folder
    assert len(more.runs) == 4
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_run_that_was_stopped_goes_on(found: sizewise.Comparison, dataset: Dataset) -> None:
    folder = found.runs["fedavg", 0].folder
    (folder / "result.json").unlink()
    again = sizewise.compare(
        perceptron, dataset, methods=["fedavg"], budgets="1MB", out=found.folder, **SMALL
    )
    assert (
        again.runs["fedavg", 0].result["state_sha256"]
        == (found.runs["fedavg", 0].result["state_sha256"])
    )


def test_another_model_or_data_of_the_same_name_is_another_task(dataset: Dataset) -> None:
    """As when a cell of a notebook is changed and run again."""

    def first() -> Any:
        def net(classes: int) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))

        return net

    def second() -> Any:
        def net(classes: int) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, classes))

        return net

    one = sizewise.compare(first(), dataset, methods=["fedavg"], **SMALL)
    two = sizewise.compare(second(), dataset, methods=["fedavg"], **SMALL)
    assert one.folder != two.folder
    with pytest.raises(ConfigError, match="holds a run with another config"):
        sizewise.compare(second(), dataset, methods=["fedavg"], out=one.folder, **SMALL)
    built = [sizewise.compare(first()(3), dataset, methods=["fedavg"], **SMALL) for _ in range(2)]
    assert built[0].folder != built[1].folder  # Their weights differ.


def test_values_in_memory_are_varied_too(dataset: Dataset) -> None:
    found = sizewise.compare(
        perceptron(3),
        dataset,
        methods=["heterofl"],
        vary={"recipe.lr": [0.01, 0.1], "fleet.budgets": [["500B"], ["1MB"]]},
        method_options={"heterofl": {"widths": [0.5, 1.0]}},
        **SMALL,
    )
    runs = found.frame(each_run=True)
    assert list(zip(runs["recipe.lr"], runs["fleet.budgets"], strict=True)) == [
        *((0.01, [500]), (0.01, [1_000_000]), (0.1, [500]), (0.1, [1_000_000])),
    ]
    assert [bool(row.note) for row in found.rows] == [True, False, True, False]
    assert "no device can take part" in runs["error"][0]
    assert "no device can take part" in repr(found)
    assert "no device can take part" in found._repr_html_()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": []}, r'methods are names such as \["fedavg", "heterofl"\], not \[\]'),
        ({"methods": [3]}, "methods are names"),
        ({"methods": ["fedavgg"]}, "did you mean 'fedavg'"),
        ({"seeds": []}, "seeds are whole numbers such as"),
        ({"seeds": [True]}, "seeds are whole numbers such as"),
        ({"jobs": 0}, "jobs must be at least 1, not 0"),
        ({"seed": 3}, r"compare takes seeds=\[0, 1, 2\], not seed"),
        ({"fleets": {}}, "compare takes no 'fleets'; did you mean 'fleet'"),
        ({"vary": {"recipe.learning": [1]}}, r"unknown key 'recipe\.learning'"),
        ({"method_options": {"small": {}}}, "by the names in methods, and 'small' is none"),
    ],
)
def test_bad_input_ends_before_anything_runs(
    changes: dict[str, Any], says: str, dataset: Dataset, tmp_path: Path
) -> None:
    arguments = {"methods": ["fedavg"], **SMALL, **changes}
    with pytest.raises(ConfigError, match=says):
        sizewise.compare(perceptron, dataset, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_comparison_without_a_single_run_is_one_sentence(dataset: Dataset) -> None:
    with pytest.raises(NothingMerged, match=r"no run of the comparison .*; fedavg: no device"):
        sizewise.compare(perceptron, dataset, methods=["fedavg", "small"], budgets=9, **SMALL)
    with pytest.raises(ModelError, match="Linear cannot run on images of shape"):
        sizewise.compare(nn.Linear(5, 3), dataset, methods=["fedavg"], **SMALL)


def test_bad_sweeps_on_the_command_line() -> None:
    Path("config.toml").write_text(CONFIG)
    bad = command("compare", "config.toml", "--methods", "fedavg", "--vary", "recipe.lr")
    assert_one_sentence(bad, "--vary takes a key and its values")
    assert not Path("runs").exists()


def test_it_prints_nothing_by_itself_in_a_notebook(
    found: sizewise.Comparison, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """There rich shows what it should only turn into text."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "fedavg" in repr(found)
    assert "\x1b" not in repr(found)
    assert capsys.readouterr().out == ""
