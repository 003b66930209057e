"""The resident node: it answers, and outlives messages that kill the process that works on them."""

import os
import re
import signal
import time
from collections.abc import Callable
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.task_identity import TaskIdentity

from sizewise.errors import ConfigError
from sizewise.flower import runner
from sizewise.flower.commands import read_settings
from sizewise.flower.connection import Connection, Place, Task, date


def leave(message: Message, context: Context) -> Message:
    os._exit(7)


def die(message: Message, context: Context) -> Message:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fail(message: Message, context: Context) -> Message:
    raise MemoryError("far too much")


def reply(message: Message, context: Context) -> Message:
    content = RecordDict({"said": ConfigRecord({"device": context.node_config["partition-id"]})})
    return Message(content, reply_to=message)


class FakeConnection(Connection):
    """A line that leads to a folder: what is sent is a file there.

    `script` is what happens, one thing for each look: an app to run, or a word.
    """

    def __init__(self, script: list[Callable[[Message, Context], Message] | str], folder: Path):
        super().__init__(Place("localhost:1", insecure=True), {"partition-id": 3})
        self.script, self.folder, self.joined = script, folder, 0

    def join(self) -> None:
        self.joined += 1
        self.node = 100 + self.joined

    def beat(self) -> bool:
        known = self.script[:1] != ["forgotten"]
        del self.script[: not known]
        return known

    def receive(self) -> Task | None:
        if not self.script:
            os.kill(os.getpid(), signal.SIGTERM)
            return None
        if self.script[0] == "gone":
            self.script.pop(0)
            raise httpx.ConnectError("nobody is there")
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 5, 1, 1
        message = Message(RecordDict(), self.node, "train")
        message.metadata.__dict__["_message_id"] = f"{len(self.script):03d}"
        return Task(message, ObjectTree())

    def reconnect(self) -> None:
        pass

    def fetch(self, task: Task) -> Message:
        return task.message

    def app_folder(self, task: Task) -> Path:
        return self.folder.parent / "app"

    def send(self, task: Task, reply: Message, seconds: float) -> int:
        text = reply.error.reason if reply.has_error() else str(reply.content["said"])
        (self.folder / reply.metadata.reply_to_message_id).write_text(text)
        return 0

    def leave(self) -> None:
        (self.folder / "left").touch()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "preload", lambda: None)
    monkeypatch.setattr(runner, "AGAIN", 0.01)


def serve(connection: FakeConnection, trust_app: bool = False) -> dict[str, str]:
    served = runner.Runner(connection, poll=0.01, trust_app=trust_app)

    def act(message: Message, context: Context) -> Message:
        action = connection.script[0]
        assert callable(action)
        return action(message, context)

    def done(job: runner.Job, reap: Callable[[runner.Job], None] = served._reap) -> None:
        reap(job)
        if served._job is None:
            connection.script.pop(0)

    served._app, served._reap = act, done  # type: ignore[method-assign]
    served.run()
    return {path.name: path.read_text() for path in connection.folder.iterdir()}


def test_messages_are_answered_whatever_became_of_others(tmp_path: Path) -> None:
    connection = FakeConnection([reply, die, "gone", fail, "forgotten", leave, reply], tmp_path)
    told = serve(connection)
    assert set(told) == {"left", "007", "006", "004", "002", "001"}
    assert told["007"] == told["001"] == "{'device': 3}"
    assert told["006"] == "the process that worked on it ended with signal 9"
    assert told["004"] == "<class 'MemoryError'>:<'far too much'>"
    assert told["002"] == "the process that worked on it ended with exit code 7"
    assert connection.joined == 2


def test_a_signal_ends_it_in_the_middle_of_a_message(tmp_path: Path) -> None:
    def wait(message: Message, context: Context) -> Message:
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
        raise AssertionError

    assert set(serve(FakeConnection([wait], tmp_path))) == {"left"}


@pytest.mark.parametrize("trusted", [True, False])
def test_modules_of_the_app_are_imported_if_it_is_trusted(tmp_path: Path, trusted: bool) -> None:
    def with_own_model(message: Message, context: Context) -> Message:
        return reply(message, context) if find_spec("model_of_the_app") else fail(message, context)

    for name in ("app", "replies"):
        (tmp_path / name).mkdir()
    (tmp_path / "app/model_of_the_app.py").touch()
    told = serve(FakeConnection([with_own_model], tmp_path / "replies"), trusted)
    assert ("device" in told["001"]) == trusted


def test_replies_are_dated_by_the_clock_of_the_superlink() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 5, 1, 1
    asked = Message(RecordDict(), 1, "train", ttl=60.0)
    asked.metadata.__dict__["_created_at"] -= 7200  # The clock of this machine is two hours ahead.
    answer = Message(RecordDict(), reply_to=asked)
    assert answer.metadata.ttl < 0
    date(answer, Task(asked, ObjectTree()), seconds=2.5)
    assert answer.metadata.created_at == asked.metadata.created_at + 2.5
    assert answer.metadata.ttl == 57.5


@pytest.mark.parametrize(("ahead", "said"), [(94, r"9\d s ahead of"), (-4005, r"4,00\d s behind")])
def test_a_wrong_clock_is_named(ahead: float, said: str) -> None:
    def failing(date: str | None) -> str:
        headers = {} if date is None else {"date": date}
        response = httpx.Response(401, headers=headers)
        return runner.reason_of(httpx.HTTPStatusError("401", request=None, response=response))  # type: ignore[arg-type]

    assert re.search(said, failing(formatdate(time.time() - ahead, usegmt=True)))
    assert "timedatectl" in failing(formatdate(time.time() - ahead, usegmt=True))
    assert failing(formatdate(usegmt=True)) == failing(None) == "401"
    assert runner.reason_of(httpx.ConnectError("nobody")) == "nobody"


def test_settings_are_read_before_anything_is_started() -> None:
    text = "partition-id=3 memory='20MB' data='/a b'"
    assert read_settings(text) == {"partition-id": 3, "memory": "20MB", "data": "/a b"}
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings("partition-id=what")
    with pytest.raises(ConfigError, match="partition-id"):
        read_settings("memory='20MB'")


def test_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no private key"):
        Place("localhost:1", key=tmp_path / "nowhere").private_key()
    (tmp_path / "key").write_text("nonsense")
    with pytest.raises(ConfigError, match="holds no private key"):
        Place("localhost:1", key=tmp_path / "key").private_key()
