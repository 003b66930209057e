"""What is cut is checked before the first round, and what stays whole is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cut_models
import sizewise
from commands import sizewise as command
from sizewise import config as configs
from sizewise.cutting import verification
from sizewise.errors import ModelError
from sizewise.methods.slt import SLT
from sizewise.methods.slt.configurations import configuration
from sizewise.report import page, records
from sizewise.runs import cuts, preparation, preview, session
from sizewise.runs.cuts import Cuts
from sizewise.training.task import Task

HALF: dict[str, dict[str, Any]] = {
    "heterofl": {"assign": "ratio"},
    "fjord": {"assign": "ratio"},
    "fedrolex": {"assign": "ratio"},
    "feddropout": {"assign": "ratio"},
    "nefl": {"widths": [0.5, 1.0]},
    "slt": {"assign": "ratio"},
    "fedavg": {"width": 0.5},
    "small": {"width": 0.5},
    "splitmix": {"atom": 0.5},
}
"""Every method that cuts, with options that let it cut to half the width."""


def config(model: str, method: str, **options: Any) -> configs.Config:
    return configs.from_dict(
        {
            "rounds": 1,
            "model": {"name": f"cut_models:{model}"},
            "data": {"train_limit": 60, "test_limit": 20},
            "fleet": {"devices": 2, "per_round": 2, "ratios": [0.5, 1.0]},
            "recipe": {"batch": 8},
            "method": {"name": method, **(options or HALF[method])},
        }
    )


# ---- the check


@pytest.mark.parametrize("method", HALF)
def test_a_model_that_cutting_breaks_is_not_trained(method: str, tmp_path: Path) -> None:
    chosen = config("counting", method)
    refused = pytest.raises(ModelError, match=r"differs from its masked self by .* in 2")
    with refused as caught, session.started(chosen, tmp_path / "run"):
        pass
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()
    with pytest.raises(ModelError, match="differs from its masked self"):
        preview.rows(chosen)


@pytest.mark.parametrize("method", ["heterofl", "nefl", "slt"])
def test_heads_of_stored_sizes_are_left_whole_and_said(method: str, tmp_path: Path) -> None:
    chosen = config("heads", method)
    said = preparation.checked(preparation.prepare(chosen).method)
    assert said is not None
    (note,) = said.whole
    assert note.startswith("2 uses sizes that it stored; the channels inside it stay whole")
    with session.started(chosen, tmp_path / "run") as federation:
        assert federation.run()["rounds"] == 1


def test_a_map_of_one_channel_keeps_the_others_in_slt() -> None:
    method = preparation.prepare(config("mapped", "slt")).method
    assert isinstance(method, SLT)
    preparation.checked(method)
    submodel = configuration(1, 0.5)
    kept = method.submodels.kept(submodel)
    assert kept is not None
    assert verification.verify(method.task.build(), method.submodels.channels, kept) < 1e-9
    module = method.submodels.module(submodel)
    stem, block = module.get_submodule("0"), module.get_submodule("1")
    assert block(stem(method.task.drawn(2))).shape[1] == cut_models.FULL // 2


def test_resuming_checks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_models, "counts", False)
    with session.started(config("counting", "heterofl"), tmp_path / "run") as federation:
        federation.run()
    monkeypatch.setattr(cut_models, "counts", True)
    with pytest.raises(ModelError, match="in 2"), session.resumed(tmp_path / "run"):
        pass
    monkeypatch.setattr(cut_models, "counts", False)
    with session.resumed(tmp_path / "run"):  # It was not damaged, and is not locked.
        pass


@pytest.mark.parametrize("name", ["run", "plan"])
def test_the_command_line_says_it_in_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model = { name = "cut_models:counting" }\nfleet = { ratios = [0.5, 1] }\n'
        'method = { name = "heterofl", assign = "ratio" }\n'
    )
    out = ["--out", tmp_path / "run"] if name == "run" else []
    answer = command(name, path, *out)
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("error: Sequential, cut, differs")
    assert not (tmp_path / "run").exists()


def count_checks(monkeypatch: pytest.MonkeyPatch, chosen: configs.Config) -> int:
    calls: list[object] = []

    def noted(*args: Any) -> float:
        calls.append(args)
        return verification.verify(*args)

    monkeypatch.setattr(preparation, "verify", noted)
    preparation.checked(preparation.prepare(chosen).method)
    return len(calls)


@pytest.mark.parametrize(
    ("method", "options", "checks"),
    [
        ("heterofl", {}, 2),
        ("fjord", {"widths": [0.25, 0.5, 0.75, 1.0]}, 2),
        ("nefl", {}, 2),
        ("slt", {}, 2),
        ("fedavg", {}, 0),
        ("fedavg", {"width": 0.5}, 0),  # Its factory takes a width: it is built narrow.
        ("fedepth", {}, 0),
    ],
)
def test_a_search_checks_few_of_the_pieces(
    method: str, options: dict[str, Any], checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {
        "model": {"name": "cnn", "args": {"layers": [8, 8, 16]}},
        "fleet": {"devices": 5, "budgets": ["40kB", "50kB", "70kB", "90kB", "2MB"]},
        "recipe": {"batch": 8},
        "data": {"train_limit": 60, "test_limit": 20},
        "method": {"name": method, **options},
    }
    if method in ("nefl", "fedepth", "slt"):
        chosen["model"] = {"name": "resnet8"}
        chosen["fleet"] = {"devices": 5, "budgets": ["1MB", "1.1MB", "1.2MB", "5MB"]}
    assert count_checks(monkeypatch, configs.from_dict(chosen)) == checks


def test_the_model_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    trace: Callable[..., Any] = Task.channels.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Task.channels, "func", lambda task: (calls.append(task), trace(task))[1])
    for method in ("heterofl", "nefl", "small"):
        made = preparation.prepare(config("mapped", method)).method
        calls.clear()
        preparation.checked(made)
        made.setup()
        made.submodels.view(made.trained()[0])
        assert len(calls) == 1, method


# ---- what is said


@pytest.mark.parametrize(
    ("share", "whole", "said"),
    [
        (0.9999, (), "99 % of the parameters shrink with the width"),
        (1.0, (), "100 % of the parameters shrink with the width"),
        (0.004, (), "less than 1 % of the parameters shrink with the width"),
        (0.62, ("a", "b"), "62 % of the parameters shrink with the width; whole: a; b"),
        (
            0.625,
            ("a", "b", "c", "d", "e"),
            "62 % of the parameters shrink with the width; whole: a; b; c; and 2 more",
        ),
        (
            0.0,
            ("a",),
            "nothing in this model shrinks with the width: a piece of any width is all of it; "
            "whole: a",
        ),
    ],
)
def test_the_sentence(share: float, whole: tuple[str, ...], said: str) -> None:
    assert str(Cuts(share, whole)) == said


def test_plan_says_what_stays_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'model = { name = "cut_models:whole" }\n'
        'method = { name = "heterofl", widths = [0.0625] }\nfleet = { budgets = ["5MB"] }\n'
    )
    shown = command("plan", path)
    assert shown.code == 0
    assert "width 0.0625" in shown.out
    assert "nothing in this model shrinks with the width" in shown.out
    found = json.loads(command("plan", path, "--json").out)
    assert found["cuts"]["share"] == 0
    assert "along" in " ".join(found["cuts"]["whole"])
    plain = command("plan", "--json", "--set", "model.name=mlp")
    assert json.loads(plain.out)["cuts"] is None


def test_a_run_says_it_first_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'rounds = 1\nmodel = { name = "cut_models:gated" }\nmethod = { name = "heterofl" }\n'
        "data = { train_limit = 60, test_limit = 20 }\n"
        'fleet = { devices = 2, per_round = 2, budgets = ["5MB"] }\n'
    )
    shown = command("run", path, "--out", tmp_path / "run")
    assert shown.code == 0
    said = str(cuts.read(tmp_path / "run"))
    assert said.startswith("87 % of the parameters shrink with the width; whole: ")
    assert "along" in said
    assert said in shown.err.splitlines()[:3]
    (run,) = records.read([tmp_path / "run"])
    assert f"<dt>heterofl</dt><dd>{said}</dd>" in page.html([run])
    # Folders of earlier versions have no such file, and runs that cut nothing do not either.
    (tmp_path / "run" / cuts.FILE).unlink()
    (run,) = records.read([tmp_path / "run"])
    assert "smaller with the width" not in page.html([run])
    again = command("resume", tmp_path / "run")
    assert again.code == 0


def test_python_users_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {
        "rounds": 1,
        "fleet": {"devices": 2, "per_round": 2},
        "data_options": {"train_limit": 60, "test_limit": 20},
    }
    run = sizewise.federate(cut_models.gated, method="heterofl", out=tmp_path / "cut", **options)
    assert run.cuts is not None
    assert 0 < run.cuts.share < 1
    assert len(run.cuts.whole) == 1
    assert str(run.cuts) in capsys.readouterr().err.splitlines()
    run = sizewise.federate(cut_models.gated, method="fedavg", out=tmp_path / "all", **options)
    assert run.cuts is None
    assert capsys.readouterr().err == ""
