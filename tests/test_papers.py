"""The reproductions: every program runs at its smallest, and every row of a suite is a config."""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

from programs import ROOT, Failed, defined, run, tables
from sizewise import config, methods
from sizewise.report import execution
from sizewise.report.comparison import Job, Outcome
from sizewise.runs import leaderboard
from text_cases import write_parquet

# `LowMemoryInference`, used by itself, leaves the end of its folder to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")

PAPERS = ROOT / "papers"
FILES = {path: tomllib.loads(path.read_text()) for path in sorted(PAPERS.glob("*/*.toml"))}
SUITES = {f"{path.parent.name}-{path.stem}": f for path, f in FILES.items() if "scale" in f}

SMOKE = {
    "fedepth/budgets.py": ("md",),
    "fedepth/fig1_memory.py": ("md", "svg"),
    "fedepth/fig4_decomposition.py": ("md", "svg"),
    "fedepth/fig6_similarity.py": ("md", "svg"),
    "fedepth/fig7_labels.py": ("md", "svg"),
    "fedepth/table1.py": ("md",),
    "fedin/reconstruct.py": ("md", "svg"),
    "fedin/table1.py": ("md",),
    "nefl/counts.py": ("md",),
    "nefl/toy.py": ("md", "svg"),
    "slt/appendix_e.py": ("md",),
    "slt/fig6_heads.py": ("md",),
    "slt/table4.py": ("md",),
}
"""What each script writes for `--smoke`."""

READERS = {
    "fedin/clients.py": "clients.mini.md",
    "fedin/fig5_seconds.py": "fig5_seconds.mini.md",
    "fedin/fig6_time.py": "fig6_time.mini.svg",
    "slt/fig7_steps.py": "fig7_steps.mini.svg",
}
"""Scripts that read the runs of a suite, and what they write beside it."""

OTHERS = {
    *("curves.py", "fidelity.py", "stale.py", "suite.py", "leaderboard/page.py"),
    *("lora/causal.py", "nefl/fig3.py", "nefl/imagenet.py"),
}
"""Those that have a test of their own each."""
LIBRARIES = {
    *("choosing.py", "common.py", "inside.py", "results.py", "unfinished.py"),
    "leaderboard/boards.py",
    *(f"{p}/shared.py" for p in ("fedepth", "fedin", "leaderboard", "nefl", "slt")),
}


def test_every_program_is_run() -> None:
    programs = {str(path.relative_to(PAPERS)) for path in PAPERS.rglob("*.py")}
    assert programs == {*SMOKE, *READERS, *OTHERS, *LIBRARIES}


@pytest.mark.parametrize("script", SMOKE)
def test_a_program_runs(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (PAPERS / script).parent.iterdir()}
    run(PAPERS / script, "--smoke")
    names = {f"{Path(script).stem}.smoke.{suffix}" for suffix in SMOKE[script]}
    assert {path.name for path in tmp_path.iterdir()} == names
    for path in tmp_path.iterdir():
        check(path)
    if script in KNOWN:
        KNOWN[script]((tmp_path / f"{Path(script).stem}.smoke.md").read_text())
    kept = {path: path.stat().st_mtime_ns for path in before if path.name != "__pycache__"}
    assert kept == {path: time for path, time in before.items() if path.name != "__pycache__"}


def check(path: Path) -> None:
    """Fail if a file is no complete table or no picture."""
    text = path.read_text()
    assert tables(text) if path.suffix == ".md" else "<svg" in text


def check_toy(text: str) -> None:
    """The paper's toy example comes out as in the paper."""
    _, toy = tables(text)
    assert all(published == ours for _, published, ours in toy[1:])


def check_budgets(text: str) -> None:
    """What is predicted is metered, and fits; so does inference."""
    (table,) = tables(text)
    for row in table[1:]:
        budget, predicted, metered, inference = map(float, row[-4:])
        assert inference < predicted == metered <= budget


def check_heads(text: str) -> None:
    """Heads become wider from step to step, up to all channels."""
    _, heads = tables(text)
    widths = [int(width) for width in heads[1][-1].split()]
    assert widths == sorted(widths)
    assert widths[-1] == int(heads[1][1])


KNOWN = {
    "fedepth/budgets.py": check_budgets,
    "fedepth/fig4_decomposition.py": check_toy,
    "slt/table4.py": check_heads,
}
"""What can be said of a smoke run's tables beforehand."""


@pytest.mark.parametrize("name", SUITES)
def test_every_row_of_every_suite_is_a_config(name: str) -> None:
    """An option that was renamed would show here, not after a night."""
    rows_of, suite = defined(PAPERS / "suite.py")["rows_of"], SUITES[name]
    for scale in suite["scale"]:
        rows, seeds = rows_of(suite, scale)
        assert rows
        assert seeds
        assert all(config.from_dict(tables) for tables in rows.values())


def test_a_scale_may_have_some_rows_and_columns_only() -> None:
    suite: dict[str, Any] = {
        "base": {},
        "scale": {"few": {"seeds": [3], "rows": ["b", "a, longer"], "columns": ["y"]}},
        "column": {"x": {"seed": 1}, "y": {"seed": 2}},
        "row": {"a": {"rounds": 5}, "b": {"rounds": 6}},
        "variant": {"longer": {"rows": ["a"], "rounds": 7}},
    }
    rows, seeds = defined(PAPERS / "suite.py")["rows_of"](suite, "few")
    assert seeds == [3]
    told = {row: (tables["seed"], tables["rounds"]) for row, tables in rows.items()}
    assert told == {"b, y": (2, 6), "a, longer, y": (2, 7)}


def test_the_other_files_are_configs() -> None:
    plain = [path for path, content in FILES.items() if "scale" not in content]
    assert plain
    assert all(config.load(path).rounds > 0 for path in plain)


TINY = """
[base]
rounds = 2
data = { train_limit = 80, test_limit = 40 }
fleet = { devices = 4, per_round = 2, ratios = [0.5, 1.0] }
model = { name = "resnet8" }
recipe = { eval_every = 2, max_steps = 1 }
[scale.mini]
seeds = [0]
[row.FedIN]
fleet = { devices = 2, per_round = 2, ratios = [] }
model = { name = "fedin_b", args = { base = 4 } }
method = { name = "fedin" }
[row.slt]
method = { name = "slt", assign = "ratio" }
[row."NeFL, tiny"]
method = { name = "nefl" }
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite that `suite.py` has run in its own folder."""
    folder = tmp_path_factory.mktemp("papers")
    (folder / "tiny.toml").write_text(TINY)
    command = [sys.executable, str(PAPERS / "suite.py"), "tiny.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "tiny.toml"


def test_a_suite_runs_and_writes_its_table(suite: Path) -> None:
    (table,) = tables(suite.with_suffix(".mini.md").read_text())
    assert [row[0] for row in table[1:]] == ["FedIN", "slt", "NeFL, tiny"]
    assert suite.with_suffix(".mini.json").exists()


CHOOSING = """
[base]
rounds = 1
data = { train_limit = 200, test_limit = 40, validation = 0.2 }
model = { name = "mlp", args = { hidden = [16] } }
recipe = { levers = "none" }
[scale.mini]
seeds = [0, 1]
[column.large]
fleet = { devices = 4, per_round = 2, budgets = ["1MB"] }
[column.tiny]
fleet = { devices = 4, per_round = 2, budgets = ["10B"] }
[row.fedavg]
method = { name = "fedavg" }
[row.fedadam]
method = { name = "fedadam" }
[variant.quick]
rows = ["fedavg"]
rounds = 2
[choose]
column = "large"
key = "recipe.lr"
values = [1e-9, 0.1, 0.2]
row = { fedadam = { key = "recipe.server_lr", values = [1e-9, 0.05] } }
"""


def test_a_suite_chooses_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def here(wanted: Sequence[Job], at_once: int, watch: execution.Watch) -> list[Outcome]:
        made.extend(f"{job.row}, seed {job.seed}" for job in wanted)
        return execution.carry_out_here(wanted, watch=watch)

    monkeypatch.setattr(execution, "carry_out", here)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "some.toml"
    path.write_text(CHOOSING)
    run(PAPERS / "suite.py", path, "--seeds", "0")
    tried = json.loads((tmp_path / "some.mini.choice.json").read_text())
    scores = {name: runs[0]["validation"]["score"] for name, runs in tried.items()}
    assert made[:3] == [f"fedavg, large, recipe.lr {lr}, seed 0" for lr in ("1e-09", "0.1", "0.2")]
    found = json.loads((tmp_path / "some.mini.json").read_text())
    assert set(found) == {
        f"{row}, {c}" for row in ("fedavg", "fedadam", "fedavg, quick") for c in ("large", "tiny")
    }
    best = max((name for name in tried if "fedavg" in name), key=lambda name: scores[name])
    assert scores[best] > scores["fedavg, large, recipe.lr 1e-09"]
    # It is the run that was made to choose by, and the variant has its rate.
    assert found["fedavg, large"] == tried[best]
    assert "fedavg, large, seed 0" not in made
    rate = config.load(
        tmp_path / "runs/papers" / f"{tmp_path.name}-some-mini/fedavg,_quick,_large-0/config.toml"
    )
    assert f"recipe.lr {rate.recipe.lr:g}" in best
    assert "no device can take part" in found["fedavg, tiny"][0]["error"]
    (table,) = tables((tmp_path / "some.mini.md").read_text())
    assert len(table) == 1 + len(found)

    # What is in the folders of runs need not be in the file.
    (tmp_path / "some.mini.json").unlink()
    run(PAPERS / "suite.py", path, "--seeds", "0")
    assert json.loads((tmp_path / "some.mini.json").read_text()) == found

    # Nothing is run twice, also where the folders of the runs are gone; refusals are not retried.
    shutil.rmtree(tmp_path / "runs")
    made.clear()
    run(PAPERS / "suite.py", path, "--seeds", "0")
    assert made == []
    run(PAPERS / "suite.py", path, "--only", "fedavg, large")
    assert made == ["fedavg, large, seed 1"]
    now = json.loads((tmp_path / "some.mini.json").read_text())
    assert [one["seed"] for one in now["fedavg, large"]] == [0, 1]
    assert {name: runs for name, runs in now.items() if name != "fedavg, large"} == {
        name: runs for name, runs in found.items() if name != "fedavg, large"
    }

    # Nor what another suite of the folder has.
    made.clear()
    shutil.copy(path, other := tmp_path / "other.toml")
    run(PAPERS / "suite.py", other, "--seeds", "0")
    assert made == []
    assert json.loads((tmp_path / "other.mini.json").read_text()) == found

    # A variant that chooses for itself; the rate that it had is known.
    path.write_text(CHOOSING.replace("[choose]", "[choose]\nvariants = true"))
    made.clear()
    run(PAPERS / "suite.py", path, "--seeds", "0", "--only", "fedavg, quick, large")
    others = [lr for lr in ("1e-09", "0.1", "0.2") if f"recipe.lr {lr}" not in best]
    assert made == [f"fedavg, quick, large, recipe.lr {lr}, seed 0" for lr in others]


def test_a_run_goes_on_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = execution.carry_out_here
    monkeypatch.setattr(execution, "carry_out", lambda wanted, _, watch: here(wanted, watch=watch))
    (tmp_path / "tiny.toml").write_text(TINY)
    only = (tmp_path / "tiny.toml", "--only", "slt")
    run(PAPERS / "suite.py", *only)
    result = json.loads((tmp_path / "tiny.mini.json").read_text())["slt"][0]["state_sha256"]

    # As if it had been stopped after its first round.
    (tmp_path / "tiny.mini.json").unlink()
    (folder,) = (tmp_path / "runs/papers").glob("*/slt-0")
    first = (folder / "history.jsonl").read_text().splitlines()[0]
    (folder / "result.json").unlink()
    (folder / "checkpoints/round-000002.safetensors").unlink()
    run(PAPERS / "suite.py", *only, "--pack")
    packed = tmp_path / "tiny.mini.unfinished/slt-0.tar.xz"
    assert packed.exists()
    shutil.rmtree(tmp_path / "runs")
    run(PAPERS / "suite.py", *only)
    assert (folder / "history.jsonl").read_text().splitlines()[0] == first  # With its seconds.
    assert json.loads((tmp_path / "tiny.mini.json").read_text())["slt"][0]["state_sha256"] == result
    assert not packed.parent.exists()


def test_results_of_earlier_versions_have_the_seeds_of_their_places(tmp_path: Path) -> None:
    results = defined(PAPERS / "results.py")["Results"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"a": [{"accuracy": 0.1}, {"accuracy": 0.2}]}))
    store = results(path)
    store.put("a", {"seed": 1, "config": "x", "accuracy": 0.3})
    assert [run["accuracy"] for run in results(path).rows["a"]] == [0.1, 0.3]
    assert results(path).find("x")["accuracy"] == 0.3
    assert results(path).find("y") is None


def test_a_suite_in_two_shells_loses_nothing(tmp_path: Path) -> None:
    results = defined(PAPERS / "results.py")["Results"]
    one, other = (results(tmp_path / "both.json") for _ in range(2))
    one.put("a", {"seed": 0, "config": "x"})
    other.put("b", {"seed": 0, "config": "y"})
    assert set(results(tmp_path / "both.json").rows) == {"a", "b"}


def test_the_leaderboard_is_that_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(PAPERS / "leaderboard/page.py", "--smoke")
    page = (tmp_path / "page.smoke.md").read_text()
    made = "run `python papers/leaderboard/page.py`"
    assert page == (PAPERS / "leaderboard/README.md").read_text(), made
    assert (tmp_path / "figures.smoke.json").read_text() == leaderboard.FILE.read_text()
    (short,) = tables((tmp_path / "short.smoke.md").read_text())
    assert len(short) == 1 + len({board.fleet for board in leaderboard.read()})
    # Every method of the library is on the page, if only to say that it is not in a table.
    assert all(f"`{name}" in page or f"| {name}" in page for name in methods.names())


@pytest.mark.parametrize("task", ["cifar10", "femnist", "sst2"])
def test_fleets_of_the_leaderboard_are_shares_of_what_the_whole_model_took(task: str) -> None:
    about = tomllib.loads((PAPERS / f"leaderboard/{task}.toml").read_text())["about"]
    path = PAPERS / f"leaderboard/{task}.mini.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for fleet in ("weak", "even", "tenth"):
        for result in found.get(f"alllarge, {fleet}", ()):
            assert set(result["peak_bytes"].values()) - {None} == {about["whole"]}


def test_results_of_other_code_are_found(suite: Path, tmp_path: Path) -> None:
    shutil.copy(suite, tmp_path)
    stored = suite.with_suffix(".mini.json")
    shutil.copy(stored, tmp_path)
    check = (PAPERS / "stale.py", tmp_path / suite.name)
    run(*check)
    copy = tmp_path / stored.name
    found = json.loads(copy.read_text())
    found["NeFL, tiny"][0]["bytes_up"] += 4
    copy.write_text(json.dumps(found))
    with pytest.raises(Failed, match=r"NeFL, tiny, seed 0: sent [0-9,]+ bytes, and would send"):
        run(*check)
    run(*check, "--only", "slt")


@pytest.mark.parametrize("script", READERS)
def test_a_program_reads_the_runs_of_a_suite(
    script: str, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(suite.parent)
    run(PAPERS / script, "--suite", suite)
    check(suite.parent / READERS[script])


def test_curves_are_drawn(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(suite.parent)
    run(PAPERS / "curves.py", suite)
    text = suite.with_suffix(".mini.curves.svg").read_text()
    assert all(row in text for row in ("FedIN", "slt", "NeFL, tiny"))


def test_a_suite_without_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    with pytest.raises(Failed, match="has no such runs"):
        run(PAPERS / "curves.py", tmp_path / "tiny.toml")


def test_submodels_of_a_run_are_drawn(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(suite.parent)
    (folder,) = (suite.parent / "runs/papers").glob("*/NeFL*")
    run(PAPERS / "nefl/fig3.py", folder, "--name", suite.parent / "fig3")
    steps, weights = tables((suite.parent / "fig3.md").read_text())
    assert len(steps) < len(weights)
    assert "<svg" in (suite.parent / "fig3.svg").read_text()


def test_weights_of_torchvision_get_our_names(tmp_path: Path) -> None:
    names = ("conv1.weight", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight", "fc.weight")
    source, target = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    save_file({name: torch.full((2,), float(n)) for n, name in enumerate(names)}, source)
    run(PAPERS / "nefl/imagenet.py", source, target)
    ours = {name: float(tensor[0]) for name, tensor in load_file(target).items()}
    assert ours == {"blocks.0.conv1.weight": 1.0, "blocks.1.projection.conv.weight": 2.0}
    source, again = target, tmp_path / "again.safetensors"
    run(PAPERS / "nefl/imagenet.py", source, again)
    assert again.read_bytes() == source.read_bytes()


@pytest.fixture
def fidelity() -> dict[str, Any]:
    return defined(PAPERS / "fidelity.py")


def test_the_page_on_fidelity_is_that_of_the_results(
    fidelity: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(PAPERS / "fidelity.py", "--smoke")
    assert (tmp_path / "fidelity.smoke.md").read_text() == (PAPERS / "FIDELITY.md").read_text()


@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if "published" in suite])
def test_published_rows_are_rows_of_the_suite(name: str, fidelity: dict[str, Any]) -> None:
    rows_of, suite = defined(PAPERS / "suite.py")["rows_of"], SUITES[name]
    known = {row for scale in suite["scale"] for row in rows_of(suite, scale)[0]}
    for setting in suite["published"]:
        assert setting["rows"].keys() <= known
        assert setting.get("metric", "main") in fidelity["METRICS"]


def test_of_what_is_contradicted_it_is_said_what_was_tried(fidelity: dict[str, Any]) -> None:
    found = [setting for path in FILES for setting in fidelity["settings"](path)]
    against = [s for s in found if any(pair.verdict == "contradicted" for pair in s.pairs)]
    assert [setting.title for setting in against if not setting.note] == []


def test_intervals_by_hand(fidelity: dict[str, Any]) -> None:
    # Rows 1 and 3, seeds at -1 and +1, and one error of +1 and -1 in each row: the deviation is 2
    # with one degree of freedom, for which the 97.5 % point of Student's t is 12.706.
    accuracies = [[1.0 - 1 + 1, 1.0 + 1 - 1], [3.0 - 1 - 1, 3.0 + 1 + 1]]
    assert fidelity["half_interval"](accuracies) == pytest.approx(12.706 * 2 * 1, rel=1e-4)
    assert fidelity["half_interval"]([[1.0], [3.0]]) == float("inf")


def test_verdicts(fidelity: dict[str, Any]) -> None:
    published = {"a": 3.0, "b": 2.0, "c": 1.0, "absent": 9.0}
    found = {"a": [50.0, 52.0, 54.0], "b": [50.1, 51.9, 54.0], "c": [60.0, 62.1, 63.9, 70.0]}
    judged = {pair.rows: pair.verdict for pair in fidelity["pairs"](published, found)}
    assert judged == {
        ("a", "b"): "not resolved",
        ("a", "c"): "contradicted",
        ("b", "c"): "contradicted",
    }


def test_a_causal_model_and_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"the {who} {does} a {what}" for who in "abc" for does in "def" for what in "ghi"]
    columns = {"sentence": rows, "label": [0, 1, 0] * 9}
    features = {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(2)}
    (tmp_path / "glue").mkdir()
    for name in ("cola", "sst2"):
        write_parquet(tmp_path / "glue" / name, features, train=columns, validation=columns)
    monkeypatch.setenv("SIZEWISE_DATA", str(tmp_path))
    monkeypatch.setenv("SIZEWISE_CACHE", str(tmp_path / "cache"))
    run(PAPERS / "lora/causal.py", "--out", tmp_path / "out", "--rounds", "1")
    said = capsys.readouterr().out
    assert "round 1: rank 1 " in said
    assert said.count("logits within") == 6
    assert (tmp_path / "out" / "rank-16.peft" / "adapter_config.json").is_file()
