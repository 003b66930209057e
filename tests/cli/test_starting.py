"""A config to start from: `sizewise init`."""

import re
import tomllib
from pathlib import Path

import pytest

from commands import sizewise
from sizewise import config as configs
from sizewise.cli import starting
from sizewise.data.catalog import DATASETS


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("data", [*DATASETS, "./photos", "rows.csv", "owner/name"])
def test_what_is_written_is_a_config(data: str) -> None:
    answers = starting.Answers(
        data, starting.usual_model(data), starting.usual_budgets(data), "heterofl"
    )
    text = starting.config(answers)
    config = configs.from_dict(tomllib.loads(text))
    assert (config.data.name, config.method.name) == (data, "heterofl")
    assert len(config.fleet.budgets) == len(answers.budgets)
    # What is there as a comment only is right as well.
    offered = [line.partition("# ")[2] for line in text.splitlines() if line.startswith("# ")]
    keys = [line.partition("   ")[0] for line in offered if " = " in line]
    assert len(keys) == 5
    tables = {"label": "data", "validation": "data", "device": "engine"}
    sets = [f"{tables.get(key.split()[0], 'recipe')}.{key.replace(' = ', '=')}" for key in keys]
    configs.from_dict(configs.assigned(tomllib.loads(text), sets))


@pytest.mark.usefixtures("_here")
def test_a_config_by_flags_is_run(tmp_path: Path) -> None:
    wished = ("--model", "mlp", "--budgets", "1MB, 2MB", "--method", "fedavg")
    answer = sizewise("init", "my run.toml", "--data", "digits", *wished)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[1:] == [
        "  sizewise plan 'my run.toml'",
        "  sizewise run 'my run.toml'",
    ]
    sets = ("--set", "rounds=1", "--set", "engine.workers=1", "--out", "run")
    assert sizewise("run", "my run.toml", *sets).code == 0
    assert configs.load(tmp_path / "run" / "config.toml").fleet.budgets == (1_000_000, 2_000_000)


@pytest.mark.usefixtures("_here")
def test_what_is_not_given_is_asked_for() -> None:
    """An empty answer is the usual; without a terminal, nobody is asked."""
    answer = sizewise("init", "asked.toml", stdin="./photos\n\n20MB,58MB\n", typed=True)
    assert answer.code == 0
    questions = re.findall(r"(\w+)[^\[\]]* \[(.*?)\]: ", answer.err)
    assert questions == [
        ("data", "digits"),
        ("model", "preresnet20"),
        ("bytes", "20MB,39MB,58MB,116MB"),
    ]
    config = configs.load(Path("asked.toml"))
    assert (config.data.name, config.model.name) == ("./photos", "preresnet20")
    assert config.fleet.budgets == (20_000_000, 58_000_000)
    answer = sizewise("init", stdin="./photos\n")
    assert (answer.code, answer.err) == (0, "")
    assert configs.load(Path("sizewise.toml")).data.name == "digits"


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "cifar1O"), "no data set is called 'cifar1O'; did you mean 'cifar10'?"),
        (("--model", "preresnt"), "no model is called 'preresnt'; did you mean 'preresnet20'?"),
        (("--budgets", "20XB"), "a budget must be a positive amount of memory"),
        (("--budgets", ","), "name the bytes of at least one device class"),
        (("--method", "fedavgg"), "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    ],
)
def test_bad_answers_leave_no_file(flags: tuple[str, str], message: str) -> None:
    answer = sizewise("init", "new.toml", *flags)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: {message}")
    assert not Path("new.toml").exists()


@pytest.mark.usefixtures("_here")
def test_a_file_that_is_there_is_left_alone() -> None:
    Path("sizewise.toml").write_text("mine")
    answer = sizewise("init")
    assert (answer.code, answer.err) == (
        2,
        "error: 'sizewise.toml' exists; choose another name, or remove it first\n",
    )
    assert Path("sizewise.toml").read_text() == "mine"
    assert "cannot be written" in sizewise("init", "nowhere/new.toml").err
