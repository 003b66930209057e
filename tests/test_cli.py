"""The command line, as a user or a script meets it."""

import gc
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Answer, assert_one_sentence, sizewise
from sizewise import __version__, cli, config, federate
from sizewise.errors import NothingMerged
from sizewise.exchange import checkpoint
from sizewise.flower import simulation as flower_simulation

KEYS = [
    "accuracy",
    "sizes",
    "rounds",
    "bytes_up",
    "bytes_down",
    "peak_bytes",
    "budget_bytes",
    "flops",
    "seconds",
    "refused",
    "state_sha256",
    "run_dir",
    "metric",
    "main",
    "best",
    "worst",
    "mean",
    "validation",
    "best_round",
    "stopped",
    "privacy",
    "sample_privacy",
    "error",
]

CONFIG = """
seed = 3
rounds = 3
[model]
name = "mlp"
args = { hidden = [16] }
[data]
train_limit = 400
test_limit = 100
[fleet]
per_round = 6
budgets = ["5kB", "1MB", "2MB"]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a finished run of it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "config.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def answer(home: Path) -> Answer:
    return sizewise("run", home / "config.toml", "--out", home / "run", "--json")


def test_json_is_the_object_of_the_contract(answer: Answer, home: Path) -> None:
    assert answer.code == 0
    (line,) = answer.out.splitlines()
    result = json.loads(line)
    assert list(result) == KEYS
    assert 0 < result["accuracy"] <= 1
    assert result["sizes"] == {"full": result["accuracy"]}
    assert result["rounds"] == 3
    assert result["budget_bytes"] == {"5kB": 5000, "1MB": 1_000_000, "2MB": 2_000_000}
    assert result["peak_bytes"].keys() == result["budget_bytes"].keys()
    assert result["peak_bytes"]["5kB"] is None
    assert 5000 < result["peak_bytes"]["1MB"] < 1_000_000
    (refused,) = result["refused"]
    assert refused["group"] == "5kB"
    assert "the device has 5,000" in refused["reason"]
    assert refused["times"] >= len(refused["devices"]) > 0
    assert result["bytes_up"] == result["bytes_down"] > 0
    assert result["flops"] > 0
    assert result["seconds"] > 0
    assert result["run_dir"] == str(home / "run")
    only = {"size": "full", "accuracy": result["accuracy"]}
    assert (result["main"], result["best"], result["worst"]) == ("full", only, only)
    assert (result["mean"], result["error"]) == (result["accuracy"], None)


def test_without_a_terminal_rounds_are_lines_on_stderr(answer: Answer, home: Path) -> None:
    line, *rounds = answer.err.splitlines()
    # Short rounds: the first and the last.
    assert [words.partition(":")[0] for words in rounds] == [f"round {n} of 3" for n in (1, 3)]
    assert f"accuracy {json.loads(answer.out)['accuracy']:.1%}, sent " in rounds[-1]
    assert line.startswith("fedavg on digits (iid), mlp, 20 devices, 6 a round")
    assert "devices disclose: weights" in line
    assert str(home / "run") in line


def test_the_run_folder_is_complete(answer: Answer, home: Path) -> None:
    run, result = home / "run", json.loads(answer.out)
    assert config.load(run / "config.toml") == config.load(home / "config.toml")
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in history] == [1, 2, 3]
    assert history[-1]["accuracy"] == result["accuracy"]
    updates = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    assert len(updates) == 3 * 6
    assert sum(line.get("bytes_up", 0) for line in updates) == result["bytes_up"]
    assert sum(line["refused"] is not None for line in updates) == result["refused"][0]["times"]
    final, _ = checkpoint.read_tensors(run / "final.safetensors")
    assert checkpoint.sha256(final) == result["state_sha256"]
    assert [path.name for path in sorted((run / "checkpoints").glob("*.safetensors"))] == [
        "round-000002.safetensors",
        "round-000003.safetensors",
    ]
    summary = json.loads((run / "partition.json").read_text())
    assert summary["devices"] == 20
    assert len(summary["histogram"]) == 20
    assert (run / "partition.safetensors").exists()
    assert not list(run.rglob("*.tmp"))


def test_the_config_of_a_run_gives_that_run_again(answer: Answer, home: Path) -> None:
    again = sizewise("run", home / "run" / "config.toml", "--out", home / "again", "--json")
    assert json.loads(again.out)["state_sha256"] == json.loads(answer.out)["state_sha256"]


def test_resume_of_a_finished_run_says_the_same(answer: Answer, home: Path) -> None:
    again = sizewise("resume", home / "run", "--json")
    assert (again.code, again.out) == (0, answer.out)


def test_the_installed_command_learns_to_read_digits(tmp_path: Path) -> None:
    """The embedded default, for fewer rounds: two workers, a folder under `runs/`."""
    done = subprocess.run(
        [Path(sys.executable).with_name("sizewise"), "run", "--set", "rounds=8", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _, *rounds = done.stderr.splitlines()
    assert rounds[0].startswith("round 1 of 8: accuracy")
    assert rounds[-1].startswith("round 8 of 8: accuracy")
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == KEYS
    assert result["accuracy"] > 0.9
    (run,) = (tmp_path / "runs").iterdir()
    assert result["run_dir"] == f"runs/{run.name}"
    assert run.name.endswith("-fedepth-digits")
    assert config.load(run / "config.toml").engine.workers == 2


def test_a_table_for_people(answer: Answer, home: Path) -> None:
    shown = sizewise("resume", home / "run")
    assert shown.code == 0
    assert "metered peak" in shown.out
    assert f"accuracy  {json.loads(answer.out)['accuracy']:.1%}" in shown.out
    assert "refused" in shown.out
    assert max(map(len, shown.out.replace(str(home), "").splitlines())) <= 80


BAD = {
    "unknown augmentation": ("recipe.augment=crop", "unknown augmentation 'crop'; did you mean"),
    "unknown key": ("recipe.lrr=1", "unknown key 'recipe.lrr'; did you mean 'lr'?"),
    "unknown table": ("fleets.devices=3", "unknown key 'fleets'; did you mean 'fleet'?"),
    "unknown option": ("method.widht=0.5", "unknown key 'method.widht'; did you mean 'width'?"),
    "misspelt method": ("method.name=fedavgg", "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    "misspelt model": ("model.name=preresnt20", "did you mean 'preresnet20'?"),
    "impossible depth": ('model={name="resnet21"}', "use resnet20 or resnet26"),
    "model option": ("model.args.size=3", "the model 'mlp' has no option 'size'"),
    "misspelt data": ("data.name=digit", "did you mean 'digits'?"),
    "missing data folder": (
        'data={name="cifar10", root="/nowhere"}',
        "data.root must be a folder, but /nowhere is none",
    ),
    "missing data path": ("data.name=/nowhere/x", "at /nowhere/x"),
    "misspelt partition": ("data.partition=idd", "unknown partition 'idd'; did you mean"),
    "partition": ("data.partition=natural", "natural needs a data set that says who wrote"),
    "too many devices": ("fleet.devices=500", "500 devices cannot share 400 samples"),
    "alpha": ("data.alpha=0", "data.alpha must be a number above 0"),
    "scenario": ("fleet.scenario=fare", "unknown fleet.scenario 'fare'; did you mean 'fair'?"),
    "negative budget": ('fleet.budgets=["-5MB"]', "fleet.budgets[0] must be a positive amount"),
    "negative number": ("fleet.budgets=[-5]", "fleet.budgets[0] must be a positive amount"),
    "per round": ("fleet.per_round=21", "fleet.per_round is 21, but the fleet has only 20"),
    "rounds": ("rounds=0", "rounds must be at least 1"),
    "wrong type": ("rounds=many", "rounds must be a whole number, not 'many'"),
    "wrong table": ("recipe=3", "recipe must be a table"),
    "workers": ("engine.workers=0", "engine.workers must be at least 1"),
    "width": ("method.width=2.0", "method.width must be in (0, 1]"),
    "choice": ("recipe.norm=bach", "recipe.norm cannot be 'bach'; did you mean 'batch'?"),
    "no equals sign": ("rounds", "--set takes key=value"),
    "path through a value": ("rounds.more=1", "'rounds' is not a table"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_end_in_one_sentence(case: str, home: Path, tmp_path: Path) -> None:
    setting, message = BAD[case]
    run = tmp_path / "run"
    answer = sizewise("run", home / "config.toml", "--set", setting, "--out", run, "--json")
    assert_one_sentence(answer, message)
    assert not run.exists()


FACTORIES = """
from torch import nn

def eleven(classes, image):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 11))

def images(classes, image):
    return nn.Conv2d(image[0], classes, 3)

def large(classes, image):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))

def text(classes, image):
    return "a model"

def broken(classes, image):
    raise ValueError("no such luck")

def good(classes, image):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture
def _factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_factories")
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("eleven", "Sequential gives 11 outputs for 10 classes"),
        ("images", "gives shape (2, 10, 6, 6)"),
        ("large", "cannot run on images of shape (1, 8, 8)"),
        ("text", "a factory returns a torch.nn.Module"),
        ("broken", "cannot be built with no options: no such luck"),
        ("missing", "has no function or class 'missing'"),
    ],
)
def test_a_model_that_does_not_suit_its_data(factory: str, message: str, home: Path) -> None:
    bare = (home / "config.toml").read_text().replace("args = { hidden = [16] }\n", "")
    Path("bare.toml").write_text(bare)
    answer = sizewise(
        "run", "bare.toml", "--set", f"model.name=cli_models:{factory}", "--out", "run"
    )
    assert_one_sentence(answer, message)
    assert not Path("run").exists()


@pytest.mark.usefixtures("_factories")
def test_a_model_of_the_users_own(home: Path) -> None:
    bare = (home / "config.toml").read_text().replace("args = { hidden = [16] }\n", "")
    Path("bare.toml").write_text(bare)
    answer = sizewise("run", "bare.toml", "--set", "model.name=cli_models:good", "--out", "run")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no config file"),
        (b"rounds = = 3", "is not valid TOML"),
        (b"rounds = 3\nrounds = 4", "is not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b"method = 3", "method must be a table"),
        (b"[method]\nname = 3", "method.name must be text"),
        (b"fleet.group = [{memory = 3}]", "'fleet.group[0].count' is missing"),
    ],
)
def test_a_bad_config_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    assert_one_sentence(sizewise("run", path, "--out", tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()
    assert_one_sentence(sizewise("plan", path), message)


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    assert_one_sentence(sizewise("run", tmp_path), "cannot be read")


def test_a_folder_that_is_not_empty_is_left_alone(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    answer = sizewise("run", home / "config.toml", "--out", tmp_path)
    assert_one_sentence(answer, "exists and is not empty; choose another --out")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    answer = sizewise("run", home / "config.toml", "--out", tmp_path / "mine.txt")
    assert_one_sentence(answer, "exists and is not empty")
    answer = sizewise("run", home / "config.toml", "--out", tmp_path / "mine.txt" / "run")
    assert_one_sentence(answer, "cannot be made")


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    assert_one_sentence(sizewise("resume", tmp_path), "is not a run folder")
    assert_one_sentence(sizewise("resume", tmp_path / "nothing"), "is not a run folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("answer")
@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_resume_from_a_damaged_checkpoint(damage: str, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/round-000003.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1000] ^= 4
    newest.write_bytes(data if damage == "flipped" else data[:-1])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    answer = sizewise("resume", tmp_path / "run", "--json")
    assert answer.code == 2
    assert answer.out == ""
    last = answer.err.splitlines()[-1]
    assert last.startswith(f"error: '{newest}' is damaged (")
    assert "Traceback" not in answer.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_nobody_can_take_part(home: Path, tmp_path: Path) -> None:
    setting = 'fleet.budgets=["1kB", "2kB"]'
    run = tmp_path / "run"
    answer = sizewise("run", home / "config.toml", "--set", setting, "--out", run)
    peak = json.loads(sizewise("plan", home / "config.toml", "--json").out)["classes"][0]
    message = f"largest budget is 2,000 bytes and the method needs at least {peak['predicted']:,};"
    assert_one_sentence(answer, message, code=3)
    assert not run.exists()
    enough = f"fleet.budgets=[{peak['predicted']}]"
    assert sizewise("run", home / "config.toml", "--set", enough, "--out", run).code == 0


def test_nothing_was_merged(home: Path, tmp_path: Path) -> None:
    """Every update diverges: the run ends, says why, and its folder is not taken for a model."""
    run = tmp_path / "run"
    sets = ("--set", "recipe.lr=1e38", "--set", "recipe.batch=4", "--set", "rounds=2")
    answer = sizewise("run", home / "config.toml", *sets, "--out", run, "--json")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err.splitlines()[-1] == (
        "error: no update was merged in 2 rounds, so the model is still untrained; the most "
        "frequent reason: its training loss is nan; lower recipe.lr or set recipe.clip"
    )
    assert answer.err.endswith(json.loads((run / "result.json").read_text())["error"] + "\n")
    assert sizewise("resume", run).code == 3
    answer = sizewise("export", run, "--size", "full", "--out", tmp_path / "m.safetensors")
    assert_one_sentence(answer, "has no model to export: no update was merged", code=3)
    with pytest.raises(NothingMerged, match="no update was merged in 1 rounds"):
        federate("linear", rounds=1, out=tmp_path / "api", recipe={"lr": 1e38, "batch": 4})


def test_plan(home: Path) -> None:
    answer = sizewise("plan", home / "config.toml", "--json")
    assert (answer.code, answer.err) == (0, "")
    rows = json.loads(answer.out.splitlines()[-1])["classes"]
    assert [row["group"] for row in rows] == ["5kB", "1MB", "2MB"]
    assert [row["refused"] is None for row in rows] == [False, True, True]
    table = sizewise("plan", home / "config.toml")
    assert (table.code, table.err) == (0, "")
    for row in rows:
        assert row["group"] in table.out
    assert rows[0]["refused"] in table.out
    assert not (Path.cwd() / "runs" / "plan").exists()


def test_plan_of_several_values(home: Path) -> None:
    config, tried = home / "config.toml", ("--vary", "recipe.batch=2,4")
    answer = sizewise("plan", config, *tried, "--json")
    varied = json.loads(answer.out.splitlines()[-1])["varied"]
    assert list(varied) == ["batch=2", "batch=4"]
    for batch in (2, 4):
        one = sizewise("plan", config, "--set", f"recipe.batch={batch}", "--json")
        rows = json.loads(one.out.splitlines()[-1])["classes"]
        assert varied[f"batch={batch}"] == rows
        assert all(row["least"] == row["predicted"] for row in rows if row["refused"] is None)
    table = sizewise("plan", config, *tried)
    assert (table.code, table.err) == (0, "")
    assert table.out.count("batch=2") == 3


def test_a_model_without_weights_is_planned_for_and_not_trained(home: Path) -> None:
    options = ("--set", "model.hollow=true", "--set", "method.name=fedlora", "--json")
    rows = json.loads(sizewise("plan", home / "config.toml", *options).out)["classes"]
    real = sizewise("plan", home / "config.toml", *options[2:])
    assert rows[-1]["bytes"] == json.loads(real.out)["classes"][-1]["bytes"]
    answer = sizewise("run", home / "config.toml", *options, "--out", home / "hollow")
    assert_one_sentence(answer, "a model without weights, which can be planned for, not trained")
    assert not (home / "hollow").exists()


@pytest.mark.parametrize("what", ["methods", "models", "datasets", "partitions", "scenarios"])
def test_list(what: str) -> None:
    names = json.loads(sizewise("list", what, "--json").out)
    assert names
    assert all(description for description in names.values())
    lines = sizewise("list", what).out.splitlines()
    assert [line.split()[0] for line in lines] == list(names)


def test_list_names_what_there_is() -> None:
    assert {"fedavg", "fedprox", "fedadam", "local"} <= json.loads(
        sizewise("list", "methods", "--json").out
    ).keys()
    answer = sizewise("list", "nonsense")
    assert (answer.code, answer.out) == (2, "")
    assert "methods" in answer.err


QUICK = """
import sys
from sizewise.cli import main
for what in (["list", "methods"], ["list", "models"], ["list", "datasets"], ["list", "partitions"],
             ["--help"], ["run", "--help"]):
    sys.argv = ["sizewise", *what]
    try:
        main()
    except SystemExit as end:
        assert not end.code
print(sorted({"torch", "numpy", "datasets", "sklearn", "matplotlib"} & sys.modules.keys()))
"""


def test_names_and_help_are_shown_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("run", "resume", "plan", "compare", "report", "export", "list"):
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize(
    "command",
    [[], ["run"], ["resume"], ["plan"], ["compare"], ["report"], ["export"], ["flower", "new"]],
    ids=" ".join,
)
def test_help_is_plain_text_and_has_a_short_name(command: list[str]) -> None:
    answer = sizewise(*command, "-h")
    assert answer.code == 0
    assert "\\" not in answer.out
    assert answer.out == sizewise(*command, "--help").out
    if command == ["run"]:
        assert "[default: local]" in " ".join(answer.out.split())


@pytest.mark.parametrize("module", ["sizewise", "sizewise.cli"])
def test_the_version_by_every_way_in(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sizewise {__version__}\n", "")


def test_hints_can_be_pasted(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "my runs"
    place.mkdir()
    (place / "mine.txt").touch()
    answer = sizewise("run", home / "config.toml", "--out", place)
    assert_one_sentence(answer, f"`sizewise resume '{place}'`")
    (place / "config.toml").write_text("seed = 0\n[method]\nname = 'fedavg'\n")
    assert_one_sentence(sizewise("report", place), f"`sizewise resume '{place}'`")


def test_what_was_imported_is_let_go_at_the_end(answer: Answer, home: Path) -> None:
    """Else what is in a cycle is never freed, and with torch 2.15 triton complains of leaks."""
    assert answer.code == 0
    assert sizewise("resume", home / "run").code == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_on_every_engine(
    home: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    seen: list[bool] = []

    def run(*given: object) -> dict[str, object]:
        seen.append(gc.isenabled())
        return dict(json.loads(answer.out))

    monkeypatch.setattr(flower_simulation, "check_installed", lambda: None)
    monkeypatch.setattr(flower_simulation, "run", run)
    assert sizewise("run", home / "config.toml", "--engine", "flower").code == 0
    assert seen == [True]


def test_an_interrupt_that_python_drops_still_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while an object is finalised is printed and forgotten by the interpreter."""
    from sizewise.runs.federation import Federation

    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    ended = Federation.round

    def round_with_interrupt(self: Federation, *arguments: object) -> object:
        Finalised()
        return ended(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Federation, "round", round_with_interrupt)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    command = ["sizewise", "run", "--out", str(tmp_path / "a run"), "--set", "rounds=3"]
    monkeypatch.setattr(sys, "argv", [*command, "--set", "engine.workers=1"])
    with pytest.raises(SystemExit) as ended_with:
        cli.main()
    assert ended_with.value.code == 130
    hint = f"interrupted; go on with: sizewise resume '{tmp_path / 'a run'}'\n"
    assert hint in capsys.readouterr().err
    assert len((tmp_path / "a run" / "history.jsonl").read_text().splitlines()) == 1


def test_a_full_disk_ends_a_run_with_a_hint(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sizewise.runs.folder import RunFolder

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "save", full)
    place = tmp_path / "my run"
    answer = sizewise("run", home / "config.toml", "--out", place, "--json")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.splitlines()[-1] == (
        "error: [Errno 28] No space left on device; mend that, then go on with: "
        f"sizewise resume '{place}'"
    )
    monkeypatch.undo()
    assert sizewise("resume", place).code == 0


def test_a_config_from_stdin(home: Path, answer: Answer) -> None:
    text = (home / "config.toml").read_text()
    piped = sizewise("run", "-", "--out", home / "piped", "--json", stdin=text)
    assert json.loads(piped.out)["state_sha256"] == json.loads(answer.out)["state_sha256"]
    assert sizewise("plan", "-", stdin=text).out == sizewise("plan", home / "config.toml").out
    assert_one_sentence(sizewise("plan", "-", stdin="rounds ="), "'-' is not valid TOML")


def test_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "complete -o default -F _sizewise_completion sizewise" in (
        sizewise("--show-completion", "bash").out
    )
    monkeypatch.setenv("_SIZEWISE_COMPLETE", "complete_bash")
    for words, choices in (("sizewise re", ["resume", "report"]), ("sizewise list p", None)):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert sizewise().out.split() == (choices or ["partitions", "profiles"])
