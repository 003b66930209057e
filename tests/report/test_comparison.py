"""Comparisons: one protocol for all, nothing is run twice, failures are told."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from commands import Answer, assert_one_sentence, sizewise
from sizewise import config
from sizewise.report import comparison, execution, live

CONFIG = """
rounds = 2
[model]
name = "mlp"
args = { hidden = [32] }
[data]
train_limit = 300
test_limit = 100
partition = "balanced-dirichlet"
alpha = 1.0
[fleet]
devices = 8
per_round = 4
budgets = ["20kB", "1MB"]
profiles = ["pi-zero-2w", "desktop"]
[method]
name = "heterofl"
widths = [0.25, 1.0]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    (folder / "config.toml").write_text(CONFIG)
    return folder


def compare(home: Path, *more: str) -> Answer:
    return sizewise("compare", home / "config.toml", "--out", home / "out", *more)


@pytest.fixture(scope="module")
def answer(home: Path) -> Answer:
    return compare(home, "--methods", "fedavg,heterofl", "--seeds", "0,1", "--json")


def test_the_object_has_means_and_spreads(answer: Answer, home: Path) -> None:
    assert answer.code == 0, answer.err
    found = json.loads(answer.out.splitlines()[-1])
    assert found["seeds"] == [0, 1]
    assert [row["name"] for row in found["rows"]] == ["fedavg", "heterofl"]
    for row in found["rows"]:
        first, second = row["accuracy"]
        assert row["mean"] == pytest.approx((first + second) / 2)
        assert row["spread"] == pytest.approx(abs(first - second) / 2**0.5)
    assert [run["folder"] for run in found["runs"]] == [
        *("fedavg-0", "heterofl-0", "fedavg-1", "heterofl-1")
    ]
    assert found["folder"] == str(home / "out")


def test_without_a_terminal_each_run_is_told_once(answer: Answer) -> None:
    assert len(answer.err.splitlines()) == 4
    assert "(4 of 4)" in answer.err


@pytest.mark.usefixtures("answer")
def test_tables_for_every_use(home: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((home / "out/table.csv").read_text())))
    assert [row["method"] for row in rows] == ["fedavg", "heterofl"]
    assert float(rows[0]["accuracy_mean"]) == pytest.approx(
        (float(rows[0]["accuracy_seed_0"]) + float(rows[0]["accuracy_seed_1"])) / 2
    )
    assert "±" in (home / "out/table.md").read_text()
    latex = (home / "out/table.tex").read_text()
    assert r"$\pm$" in latex
    assert latex.count(r"\\") == 3
    assert "fedavg" in (home / "out/report.html").read_text()


@pytest.mark.usefixtures("answer")
def test_what_is_piped_is_whole_and_what_is_written_is_what_is_shown(home: Path) -> None:
    shown = compare(home, "--methods", "fedavg,heterofl", "--seeds", "0,1").out
    head, _, *rows = (home / "out/table.md").read_text().split("\n\n")[0].splitlines()
    for line in (head, *rows):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert any(all(cell in text for cell in cells) for text in shown.splitlines()), line
    assert "…" not in shown


@pytest.mark.usefixtures("answer")
def test_all_methods_of_a_seed_have_one_protocol(home: Path) -> None:
    """Same split, same budgets, same sampled devices; other seeds have others."""

    def protocol(name: str) -> tuple[bytes, dict[str, int], list[tuple[int, int]]]:
        folder = home / "out" / name
        lines = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
        asked = sorted((line["round"], line["device"]) for line in lines)
        budgets = json.loads((folder / "result.json").read_text())["budget_bytes"]
        return (folder / "partition.safetensors").read_bytes(), budgets, asked

    assert protocol("fedavg-0") == protocol("heterofl-0")
    assert protocol("fedavg-1") == protocol("heterofl-1")
    assert protocol("fedavg-0") != protocol("fedavg-1")


@pytest.mark.usefixtures("answer")
def test_what_is_done_is_not_run_again_and_what_was_cut_off_goes_on(home: Path) -> None:
    result = json.loads((home / "out/heterofl-1/result.json").read_text())
    before = (home / "out/fedavg-0/final.safetensors").stat().st_mtime_ns
    # As if it had been killed after its first round.
    (home / "out/heterofl-1/result.json").unlink()
    for last in (home / "out/heterofl-1/checkpoints").glob("round-000002*"):
        last.unlink()
    again = compare(home, "--methods", "fedavg,heterofl", "--seeds", "0,1", "--json")
    assert again.code == 0, again.err
    assert (home / "out/fedavg-0/final.safetensors").stat().st_mtime_ns == before
    resumed = json.loads((home / "out/heterofl-1/result.json").read_text())
    assert resumed["state_sha256"] == result["state_sha256"]


@pytest.mark.usefixtures("answer")
def test_a_folder_of_another_config_is_left_alone(home: Path) -> None:
    other = compare(home, "--methods", "fedavg", "--set", "rounds=3")
    assert_one_sentence(other, "holds a run with another config")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", ""), "--methods names what to compare"),
        (("--methods", "fedavg,fedepht"), "did you mean 'fedepth'?"),
        (("--methods", "fedavg", "--seeds", "0,x"), "--seeds takes whole numbers"),
        (("--methods", "fedavg", "--set", "rounds=0"), "rounds must be at least 1"),
    ],
)
def test_bad_input_ends_before_anything_runs(
    arguments: tuple[str, ...], message: str, home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    bad = sizewise("compare", home / "config.toml", "--out", out, *arguments)
    assert_one_sentence(bad, message)
    assert not out.exists()


@pytest.mark.usefixtures("answer")
def test_a_method_that_no_device_can_train_is_a_finding(home: Path, tmp_path: Path) -> None:
    """FedAvg does not fit; what heterofl did is taken from an earlier comparison."""
    out = tmp_path / "out"
    tables = config.read(home / "config.toml", ['fleet.budgets=["20kB"]'])
    rows = comparison.by_method(tables, ["fedavg"])
    (job,) = comparison.jobs(rows, [0], out)
    outcomes = execution.carry_out([job], 1)
    assert outcomes[0].exit_code == 3
    assert "no device can take part" in outcomes[0].error
    found = comparison.save(out, outcomes)
    assert "no device can take part" in found["rows"][0]["note"]
    assert "no device can take part" in (out / "table.md").read_text()


def test_a_method_of_which_nothing_was_merged_is_a_finding(home: Path, tmp_path: Path) -> None:
    rows = {
        name: config.read(home / "config.toml", [*sets, "rounds=1", "method={name='fedavg'}"])
        for name, sets in {"good": [], "wild": ["recipe.lr=1e30"]}.items()
    }
    outcomes = execution.carry_out(comparison.jobs(rows, [0], tmp_path), 2)
    assert [outcome.exit_code for outcome in outcomes] == [0, 3]
    found = comparison.save(tmp_path, outcomes)
    assert [run["result"] is None for run in found["runs"]] == [False, True]
    assert "no update was merged in 1 rounds" in found["rows"][1]["note"]
    assert "no update was merged in 1 rounds" in (tmp_path / "table.md").read_text()
    assert sizewise("report", tmp_path).code == 0
    assert "no update was merged in 1 rounds" in (tmp_path / "report.html").read_text()


def test_options_stay_with_their_method() -> None:
    tables = {"method": {"name": "heterofl", "widths": [0.5]}, "rounds": 3}
    rows = comparison.by_method(tables, ["fedavg", "heterofl"])
    assert rows["fedavg"]["method"] == {"name": "fedavg"}
    assert rows["heterofl"]["method"] == tables["method"]
    (one, two) = comparison.jobs(rows, [7], Path("nowhere"))
    assert (one.seed, one.config.seed, one.config.engine.workers) == (7, 7, 1)
    assert two.config.method.options["widths"] == [0.5]
    assert comparison.identity(tables) == comparison.identity({**tables, "method": {}, "seed": 3})
    assert comparison.identity(tables) != comparison.identity({**tables, "rounds": 4})


@pytest.mark.usefixtures("answer")
def test_the_live_table(home: Path) -> None:
    """One line a method, one column a seed: done, under way, waiting."""
    tables = config.read(home / "config.toml")
    rows = comparison.by_method(tables, ["fedavg", "heterofl", "small"])
    jobs = comparison.jobs(rows, [0, 1], home / "out")
    done = [found for job in jobs if (found := comparison.finished(job))]
    assert len(done) == 4
    running = [job for job in jobs if job.row == "fedavg" and job.seed == 1]
    done = [outcome for outcome in done if outcome.job not in running]
    table = live.LiveTable(jobs).table(running, done, 80)
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "seed 0" in text
    assert "seed 1" in text
    assert "round 2 of 2" in text
    assert text.count("waiting") == 2
    assert text.count(" in ") == 3
    assert "3 of 6 done" in text
