"""`sizewise flower node`: one resident process that has everything imported.

`flower-supernode` starts a new process for every message, which imports torch first. Here the
process that asks for messages has torch imported, and forks for each: the child fetches the
message, trains, replies and ends, so its memory is given back and a crash costs one message. The
parent has a single thread and never calls torch, so forking it is safe.

By default a node runs its own sizewise, never code that a server sends. With `trust_app`, modules
of the app, such as a model of your own, are importable, as on a plain SuperNode.
"""

import gc
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FrameType

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from sizewise.flower import usage
from sizewise.flower.connection import App, Connection, Task, wrong_clock
from sizewise.flower.node import make_app

log = logging.getLogger("sizewise.node")

PRELOADED = (
    *("sizewise.runs.preparation", "sizewise.engines.device_runner", "sizewise.methods"),
    *("sizewise.flower.replies", "sizewise.training.evaluation", "numpy", "sizewise.flower.memory"),
)
"""What a message would import otherwise, each time."""

REAPED = 0.02
"""Seconds between two looks at a child that works."""

AGAIN = 5.0
"""Seconds after which a SuperLink that is not there is looked for again."""


@dataclass(frozen=True)
class Job:
    """A message that a child works on."""

    task: Task
    child: int
    start: float


class Stop:
    """Whether somebody asked the process to end."""

    def __init__(self) -> None:
        self.asked = False

    def wait(self, seconds: float) -> None:
        """Wait so long, or until somebody asks."""
        end = time.monotonic() + seconds
        while not self.asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listen to signals for the while."""

        def hear(number: int, frame: FrameType | None) -> None:
            self.asked = True

        before = {n: signal.signal(n, hear) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def preload() -> None:
    """Import what training needs, and keep the collector from touching it, so that it is shared."""
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


class Runner:
    """Serves one node, a message at a time."""

    def __init__(self, connection: Connection, poll: float, trust_app: bool = False) -> None:
        self._connection, self._poll, self._trust_app = connection, poll, trust_app
        self._app: App = make_app()
        self._job: Job | None = None
        self._stop = Stop()

    def run(self) -> None:
        """Serve until a signal comes; raise EngineError if the SuperLink does not take the node."""
        with tempfile.TemporaryDirectory(prefix="sizewise-node-") as folder, self._stop.heard():
            self._connection.settings.setdefault("state-dir", folder)
            preload()
            if (base := usage.process_bytes()) is not None:
                log.info("waiting in %.0f MB", base / 1e6)
            while not self._stop.asked:
                try:
                    self._join()
                    self._serve()
                except httpx.HTTPError as error:
                    log.warning("%s; trying again in %g s", reason_of(error), AGAIN)
                    self._stop.wait(AGAIN)
            if self._job is not None:
                os.kill(self._job.child, signal.SIGTERM)
                os.waitpid(self._job.child, 0)
            self._connection.leave()
            log.info("left")

    def _join(self) -> None:
        if self._connection.node == 0:
            self._connection.join()
            device = self._connection.settings.get("partition-id")
            log.info("joined as node %s, device %s", self._connection.node, device)

    def _serve(self) -> None:
        """Answer messages until a signal comes, or the SuperLink is gone."""
        while not self._stop.asked:
            if not self._connection.beat():
                log.warning("the SuperLink no longer knows this node; joining again")
                self._connection.node = 0
                return
            if self._job is not None:
                self._reap(self._job)
            elif (task := self._connection.receive()) is not None:
                self._job = self._fork(task)
                log.info("received %s of run %s", task.kind, task.run)
            else:
                self._stop.wait(self._poll)

    def _fork(self, task: Task) -> Job:
        start = time.monotonic()
        child = os.fork()
        if child:
            return Job(task, child, start)
        code = 1
        try:
            self._work(task, start)
            code = 0
        except BaseException as error:
            log.exception("the reply could not be sent", exc_info=error)
        finally:
            os._exit(code)

    def _work(self, task: Task, start: float) -> None:
        """Answer one message, as a process of its own."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        usage.kill_me_first()
        if "memory" in self._connection.settings:
            usage.give_back_at_once()
        self._connection.reconnect()
        try:
            if self._trust_app:
                sys.path.insert(0, str(self._connection.app_folder(task)))
            reply = self._connection.answer(task, self._app)
        except Exception as error:
            log.exception("the message failed", exc_info=error)
            reason = f"{type(error)}:<'{error}'>"
            failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
            reply = Message(failure, reply_to=task.message)
        sent = self._connection.send(task, reply, time.monotonic() - start)
        log.info("answered %s with %s bytes", task.kind, f"{sent:,}")

    def _reap(self, job: Job) -> None:
        """See whether the child is done; if it died, say so in its place."""
        done, status, used = os.wait4(job.child, os.WNOHANG)
        if not done:
            self._stop.wait(REAPED)
            return
        self._job = None
        seconds, peak = time.monotonic() - job.start, used.ru_maxrss / 1e3
        log.info("%s took %.2f s, at most %.0f MB", job.task.kind, seconds, peak)
        if (code := os.waitstatus_to_exitcode(status)) != 0:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            reason = f"the process that worked on it ended with {how}"
            log.error("%s", reason)
            self._connection.identify(job.task)
            failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
            self._connection.send(job.task, Message(failure, reply_to=job.task.message), seconds)


def reason_of(error: httpx.HTTPError) -> str:
    """Return why a request failed, and whether it is the clock of this machine."""
    clock = wrong_clock(error.response) if isinstance(error, httpx.HTTPStatusError) else ""
    return f"{error}; {clock}" if clock else str(error)


def start_logging() -> None:
    """Log to stderr, with times."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("sizewise")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
