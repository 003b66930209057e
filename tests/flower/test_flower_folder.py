"""`sizewise flower new` and `sizewise run --engine flower`, as a user meets them."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sizewise import __version__, cli
from sizewise import config as configs


def sizewise(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["sizewise", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "My app"
    code = sizewise("flower", "new", str(path), "--set", "rounds=7", monkeypatch=monkeypatch)
    assert code == 0
    return path


def test_the_folder_is_a_flower_app(folder: Path) -> None:
    pytest.importorskip("flwr")
    from flwr.cli.config_utils import load_and_validate

    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert warnings == []
    app = config["tool"]["flwr"]["app"]
    assert config["project"]["name"] == "my-app"
    assert app["config"]["out"] == str(folder.with_name("My app-run"))


def test_its_config_is_the_whole_config(folder: Path) -> None:
    written = configs.load(folder / "sizewise_app/config.toml")
    assert written == configs.load(None, ["rounds=7"])
    tables = tomllib.loads((folder / "sizewise_app/config.toml").read_text())
    assert tables["engine"]["flower"]["deadline"] == 3600


def test_its_apps_can_be_imported(folder: Path) -> None:
    pytest.importorskip("flwr")
    code = (
        "from sizewise_app.client_app import app as client\n"
        "from sizewise_app.server_app import app as server\n"
        "print(type(client).__name__, type(server).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["ClientApp", "ServerApp"], done.stderr


@pytest.mark.parametrize(
    ("unit", "program", "words"),
    [
        ("sizewise-node@", "sizewise", ["sizewise", "flower", "node"]),
        ("sizewise-superlink", "flower-superlink", ["flower-superlink"]),
    ],
)
def test_its_units_start_what_they_name(
    unit: str, program: str, words: list[str], folder: Path
) -> None:
    pytest.importorskip("flwr")
    path = folder / f"deploy/{unit}.service"
    text = path.read_text()
    command = re.search(r"ExecStart=(/opt/sizewise/bin/(.*?))\n[A-Z]", text, re.S)
    assert command
    assert command[2].split()[: len(words)] == words
    module = {"sizewise": ["-m", "sizewise"]}.get(
        program, [str(Path(sys.executable).with_name(program))]
    )
    shown = subprocess.run(
        [sys.executable, *module, *words[1:], "--help"], capture_output=True, text=True, check=True
    )
    options = re.findall(r"(--[a-z-]+)", command[2])
    assert len(options) >= 5
    assert [option for option in options if option not in shown.stdout] == []
    if (verify := shutil.which("systemd-analyze")) is not None:
        path.write_text(text.replace(command[1].split()[0], "/bin/true"))
        done = subprocess.run([verify, "verify", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert str(path.name) not in done.stderr


def test_its_container_has_this_version(folder: Path) -> None:
    text = (folder / "deploy/Containerfile").read_text()
    assert f'"sizewise[flower]=={__version__}"' in text
    assert text.splitlines()[-1] == 'ENTRYPOINT ["sizewise", "flower", "node"]'


def test_a_folder_that_is_not_empty_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert sizewise("flower", "new", str(tmp_path), monkeypatch=monkeypatch) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_simulation_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code = sizewise("run", "--engine", "flower", "--out", str(out), monkeypatch=monkeypatch)
    assert code == 2
    assert "pip install 'sizewise[" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.skipif(
    find_spec("ray") is None,
    reason="Ray, 220 MB, is not a part of [dev]; the test below does without. "
    "With it: pip install 'sizewise[simulation]'",
)
def test_the_simulation_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    small = ["rounds=2", "method.name=fedavg", "model.name=linear", "fleet.devices=4"]
    small += ["fleet.per_round=2", 'fleet.budgets=["1MB","2MB"]', "data.train_limit=100"]
    values = [part for value in small for part in ("--set", value)]
    hashes = []
    for engine in ("local", "flower"):
        # Processes of their own: Ray leaves files open in the one that it ran in.
        command = [sys.executable, "-m", "sizewise.cli", "run", "--engine", engine, "--json"]
        command += ["--out", str(tmp_path / engine), *values]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        hashes.append(json.loads(done.stdout.splitlines()[-1])["state_sha256"])
    assert hashes[0] == hashes[1]


def test_our_side_of_the_simulation_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes in memory stand in for Ray's: the same bits, each round told, errors come through."""
    pytest.importorskip("flwr")
    from fake_grid import FakeGrid
    from flwr.app import Context, RecordDict

    from sizewise.errors import TooFewUpdates
    from sizewise.flower import simulation as flower_simulation
    from sizewise.runs import session

    tables = {
        "rounds": 2,
        "model": {"name": "linear"},
        "data": {"train_limit": 100, "test_limit": 50},
        "fleet": {"devices": 4, "per_round": 2, "budgets": ["1MB", "2MB"]},
        "engine": {"workers": 3},
    }
    chosen = configs.from_dict(tables)
    asked: list[tuple[int, Any]] = []

    def simulate(server: Any, client: Any, count: int, backend_config: Any) -> None:
        asked.append((count, backend_config["init_args"]))
        server(
            FakeGrid({"partition-id": n} for n in range(count)), Context(1, 0, {}, RecordDict(), {})
        )

    monkeypatch.setattr(flower_simulation, "check_installed", lambda: None)
    monkeypatch.setattr("flwr.simulation.run_simulation", simulate)
    rounds: list[int] = []
    result = flower_simulation.run(
        chosen, tmp_path / "flower", lambda line, totals: rounds.append(line["round"])
    )
    assert (rounds, asked) == ([1, 2], [(4, {"num_cpus": 3})])
    alone = configs.from_dict({**tables, "engine": {}})
    with session.started(alone, tmp_path / "local") as federation:
        assert result["state_sha256"] == federation.run()["state_sha256"]
    wild = configs.from_dict({**tables, "recipe": {"lr": 1e38, "batch": 4, "weight_decay": 1.0}})
    with pytest.raises(TooFewUpdates, match="round 1 got 0 of at least 1 updates"):
        flower_simulation.run(wild, tmp_path / "wild", lambda line, totals: None)
