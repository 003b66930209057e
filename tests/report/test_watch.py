"""The report of a run that goes on: one page, on this machine only, that keeps up with it."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from commands import assert_one_sentence, sizewise
from sizewise import config as configs
from sizewise.report import watch
from sizewise.runs import session

TABLES = {
    "rounds": 2,
    "model": {"name": "linear"},
    "data": {"train_limit": 60, "test_limit": 20},
    "fleet": {"devices": 2, "per_round": 2},
}
REFRESH = '<meta http-equiv="refresh"'


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    with session.started(configs.from_dict(TABLES), folder) as federation:
        federation.run()
    return folder


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    """A run that has just begun."""
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    (folder / "result.json").unlink()
    (folder / "history.jsonl").write_text("")
    return folder


@pytest.fixture
def watching(run: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command as a user starts it, and its port."""
    command = [sys.executable, "-m", "sizewise", "report", "--watch", str(run)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, interrupts are ignored, and so by what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:"), line
    yield process, int(line.split("/")[2].partition(":")[2])
    process.kill()
    process.communicate()


def ask(
    port: int, path: str = "/", method: str = "GET", **headers: str
) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_it_follows_a_run_and_ends_with_an_interrupt(
    watching: tuple[subprocess.Popen[str], int], run: Path, done: Path
) -> None:
    process, port = watching
    before = sorted(run.iterdir())
    answer, text = ask(port)
    assert answer.status == 200
    assert "has been evaluated yet.</p>" in text
    assert REFRESH in text
    lines = (done / "history.jsonl").read_text().splitlines(keepends=True)
    (run / "history.jsonl").write_text(lines[0])
    _, text = ask(port)
    assert "1 of 2 rounds" in text
    assert REFRESH in text
    (run / "history.jsonl").write_text("".join(lines))
    shutil.copy(done / "result.json", run)
    _, text = ask(port)
    assert "2 rounds" in text
    assert REFRESH not in text, "it is done"
    assert sorted(run.iterdir()) == sorted([*before, run / "result.json"]), "nothing is written"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_comparison_under_way_is_what_has_begun_of_it(done: Path, tmp_path: Path) -> None:
    for name in ("fast-0", "slow-0"):
        shutil.copytree(done, tmp_path / name)
    (tmp_path / "slow-0" / "result.json").unlink()
    (tmp_path / "slow-0" / "history.jsonl").write_text("")
    watched = watch.Watch([tmp_path])
    text = watched.page()
    assert "<h1>fast reaches" in text
    assert "slow" not in text
    shutil.copy(done / "history.jsonl", tmp_path / "slow-0")
    text = watched.page()
    assert "<h1>fast and slow are close" in text
    shutil.copy(done / "result.json", tmp_path / "slow-0")
    assert REFRESH in watched.page(), "more runs may follow"
    runs = [{"row": row, "folder": f"{row}-0", "result": {}} for row in ("fast", "slow")]
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": runs}))
    assert REFRESH not in watched.page()


def test_nothing_else_can_be_asked_for(
    watching: tuple[subprocess.Popen[str], int], run: Path
) -> None:
    process, port = watching
    assert ask(port, "/config.toml")[0].status == 404
    assert ask(port, "/../run/config.toml")[0].status == 404
    assert ask(port, "/", Host=f"evil.example:{port}")[0].status == 403
    assert ask(port, "/", Host=f"localhost:{port}")[0].status == 200
    assert ask(port, "/", "POST")[0].status == 501
    answer, _ = ask(port)
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert answer.headers["Server"].strip() == "sizewise"
    shutil.rmtree(run)
    answer, text = ask(port)
    assert answer.status == 503
    assert "neither a run folder nor a comparison" in text
    with pytest.raises(OSError, match=r"refused|reachable"):  # Other addresses of this machine.
        socket.create_connection(("127.0.0.2", port), timeout=5)
    with socket.create_connection(("127.0.0.1", port)):
        pass  # One that hangs up.
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")


def test_what_cannot_be_watched_is_one_sentence(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done, tmp_path / "20261116-101500-fedepth-digits")
    assert_one_sentence(sizewise("report", "--watch", tmp_path), "neither a run folder nor")
    out = tmp_path / "x.html"
    assert_one_sentence(sizewise("report", "--watch", done, "--out", out), "writes nothing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = sizewise("report", "--watch", done, "--port", port)
    assert_one_sentence(answer, f"port {port} of this machine cannot be used")
