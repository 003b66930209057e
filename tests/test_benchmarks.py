"""Every benchmark runs at its smallest; what it measures then means nothing."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from programs import ROOT, Failed, run, tables
from sizewise.memory.prediction import predict

BENCHMARKS = ROOT / "benchmarks"

HERE = (
    *("anything.py", "cutting.py", "fedepth.py", "layouts.py", "levers.py", "membership.py"),
    *("merge.py", "nefl.py", "per_sample.py", "robustness.py", "shrinking.py", "smallest.py"),
)
"""Run in this process."""

APART = ("memory.py", "outside.py", "startup.py", "peers/compare.py", "peers/scale.py")
"""They start processes of their own."""

OTHERS = (
    "flower.py",
    "fleet.py",
    "peers/bare.py",
    "peers/sizewise_channels_last.py",
    "peers/sizewise_run.py",
    "peers/sizewise_together.py",
)

PEERS = (
    "peers/flower_client.py",
    "peers/flower_run.py",
    "peers/pfl_run.py",
    "peers/pfl_training.py",
)
"""They run in environments of their own, with Ray or pfl, which tests do not have."""

LIBRARIES = (
    *("common.py", "outside_modules.py", "outside_oddities.py"),
    *("peers/environments.py", "peers/memory_of_tree.py", "peers/work.py"),
)


def test_every_program_is_run() -> None:
    programs = {str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("[!.]*.py")}
    programs = {name for name in programs if not name.startswith("peers/.")}
    assert programs == {*HERE, *APART, *OTHERS, *PEERS, *LIBRARIES}


def test_every_program_is_in_the_readme() -> None:
    """And `make bench` runs it."""
    readme, makefile = (BENCHMARKS / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for name in (*HERE, *APART, "flower.py"):
        assert f"({name})" in readme, name
        assert re.search(rf"\b{Path(name).stem}\b", makefile), name


def smoke(script: str, *arguments: str) -> str:
    """Return what a benchmark prints, run as a process."""
    command = [sys.executable, str(BENCHMARKS / script), "--smoke", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("script", HERE)
def test_a_benchmark_runs(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(BENCHMARKS / script, "--smoke")
    text = capsys.readouterr().out
    if script == "merge.py":
        ratios = json.loads(text.splitlines()[-1])
        assert set(ratios) == {"prefix", "rolling", "random"}
        assert min(ratios.values()) > 0
        return
    (table,) = tables(text)
    if script == "nefl.py":  # It has compared predicted with metered bytes as well.
        assert table[-1][1:5] == ["1.00"] * 4
        assert float(table[1][4]) < 1
    if script == "anything.py":
        assert all(cell.endswith(" of 3") for row in table[1:] for cell in row[1:])
        assert "0 were refused and 0 are wrong" in text
    if script == "cutting.py":
        parameters = [int(row[2].replace(",", "")) for row in table[1:]]
        assert parameters == sorted(parameters, reverse=True)


def test_a_benchmark_with_wrong_arguments_is_refused() -> None:
    """If that went through, the tests above would say nothing."""
    with pytest.raises(Failed):
        run(BENCHMARKS / "merge.py", "--repeats", "none")


def test_predicted_bytes_are_those_of_the_allocator() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("heap.c needs a compiler")
    if predict(torch.nn.Linear(2, 2), torch.zeros(2, 2)).process is None:
        pytest.skip("bytes of a process are not known for this CPU")
    (table,) = tables(smoke("memory.py").partition("## ")[2])
    (row,) = table[1:]
    assert row[5] == row[6], "predicted and metered"


def test_the_share_that_shrinks_is_counted() -> None:
    (table,) = tables(smoke("shrinking.py"))
    rows = {row[0]: row[3] for row in table[1:]}
    assert rows == {"LSTM, 2 layers of 512": "100.0%", "GRU, 2 layers of 512, both ways": "100.0%"}


def test_odd_modules_are_judged() -> None:
    (table,) = tables(smoke("outside.py"))
    outcomes = {row[1]: row[2] for row in table[1:]}
    assert outcomes == {
        "CountedHeads": "right",
        "ConcatBeforeGroups": "whole",
        "Scripted": "refused",
    }


def test_the_start_is_timed() -> None:
    row = re.search(r"^fedavg +([0-9.]+) +x [0-9.]+ +([0-9.]+)$", smoke("startup.py"), re.M)
    assert row
    assert 0 < float(row[1]) < float(row[2])


def test_the_bare_loop_and_sizewise_do_the_same_work() -> None:
    text = smoke("peers/compare.py")
    (table,) = tables(text)
    assert [row[0] for row in table[1:]] == ["bare PyTorch loop", "sizewise, 1 worker"]
    # After two rounds accuracies may differ by more than is asked for; counts may not.
    assert "clients, steps, samples" not in text


def test_a_fleet_is_scaled() -> None:
    (table,) = tables(smoke("peers/scale.py"))
    (row,) = table[1:]
    assert row[:2] == ["1,000", "10"]


@pytest.mark.parametrize("how", ["together", "channels_last"])
def test_other_ways_do_the_same_work(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(BENCHMARKS / f"peers/sizewise_{how}.py", "c", "--rounds", "1")
    report = json.loads(capsys.readouterr().out)
    assert (report["clients"], report["steps"], report["samples"]) == (1000, 1000, 20_000)


def test_the_side_without_flower_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own side takes a minute: tests/flower has deployments of its own."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = runpy.run_path(str(BENCHMARKS / "flower.py"))
    tiny = ["data.train_limit=40", "data.test_limit=20", "recipe.epochs=1"]
    result = names["here"](names["make_config"](2, 2, tiny), tmp_path / "here")
    assert len(result["state_sha256"]) == 64
    assert len(names["seconds"](tmp_path / "here")) == 1


def test_updates_in_fewer_bytes_are_compared() -> None:
    """The other parts of it start deployments, which tests/flower has of its own."""
    (table,) = tables(smoke("fleet.py", "upload"))
    assert [row[0] for row in table[1:]] == ["full", "bf16", "int8", "topk"]
    assert [row[2] for row in table[1:3]] == ["100.0%", "50.0%"]


@pytest.mark.parametrize("script", PEERS)
def test_programs_of_peers_are_python(script: str) -> None:
    """Nothing more: Ray and pfl are not installed here, and 220 MB are not for tests."""
    compile((BENCHMARKS / script).read_text(), script, "exec")


def test_arguments_of_peers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    run(BENCHMARKS / "peers/pfl_run.py", "--help")
    assert "{a,b,c}" in capsys.readouterr().out
    with pytest.raises(Failed):
        run(BENCHMARKS / "peers/pfl_run.py", "d")
