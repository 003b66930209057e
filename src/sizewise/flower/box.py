"""`sizewise flower box`: a fleet in a box, many nodes in one process, to try policies with.

Every node is one to the SuperLink, with an id, a key and messages of its own; they share a process,
which answers their messages one after the other. Faults can be turned on (`faults`).
"""

import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from sizewise.errors import ConfigError
from sizewise.flower.connection import App, Connection, Place, Task
from sizewise.flower.faults import Faults
from sizewise.flower.node import make_app
from sizewise.flower.runner import AGAIN, Stop, preload, reason_of

log = logging.getLogger("sizewise.box")


@dataclass(frozen=True)
class Outgoing:
    """A reply that is to be sent at some time, by the node that made it."""

    when: float
    node: Connection
    task: Task
    reply: Message
    seconds: float


class Box:
    """Nodes, by the number of their device, and what they have not sent yet."""

    def __init__(
        self,
        place: Place,
        devices: Sequence[int],
        settings: Mapping[str, Any],
        poll: float,
        faults: Faults,
    ) -> None:
        self._place, self._settings = place, dict(settings)
        self._poll, self._faults = poll, faults
        self._app: App = make_app()
        self._devices = devices
        self._nodes: dict[int, Connection] = {}
        self._outgoing: list[Outgoing] = []
        self._trained = dict.fromkeys(devices, 0)
        self._stop = Stop()

    def run(self) -> None:
        """Serve until a signal comes; raise EngineError if the SuperLink does not take a node."""
        with tempfile.TemporaryDirectory(prefix="sizewise-box-") as folder, self._stop.heard():
            self._settings.setdefault("state-dir", folder)
            preload()
            while not self._stop.asked:
                try:
                    if not self._sweep():
                        self._stop.wait(self._poll)
                except httpx.HTTPError as error:
                    log.warning("%s; trying again in %g s", reason_of(error), AGAIN)
                    self._stop.wait(AGAIN)
            for node in self._nodes.values():
                node.leave()

    def _join(self, device: int) -> Connection:
        node = Connection(self._place, {**self._settings, "partition-id": device})
        node.join()
        self._nodes[device] = node
        log.info("device %s joined as node %s", device, node.node)
        return node

    def _sweep(self) -> bool:
        """Look after every node once; return whether there was something to do."""
        busy = False
        for device in self._devices:
            if self._stop.asked:
                break
            self._beat()
            node = self._nodes.get(device) or self._join(device)
            if (task := node.receive()) is not None:
                busy = True
                self._answer(device, node, task)
            self._send()
        return busy

    def _beat(self) -> None:
        """Say of all nodes that they are alive, where it is due: others may work for long."""
        for device, node in list(self._nodes.items()):
            if not node.beat():
                self._join(device)

    def _answer(self, device: int, node: Connection, task: Task) -> None:
        """Do a node's work, and see what becomes of its reply."""
        start, fate = time.monotonic(), Faults().draw(device, 0)
        if task.kind == "train":
            fate = self._faults.draw(device, self._trained[device])
            self._trained[device] += 1
        if fate.kind:
            log.info("device %s: %s", device, fate.kind)
        if fate.kind == "die":
            self._join(device)  # Its old self is silent from now on.
            return
        try:
            reply = node.answer(task, self._app)
        except Exception as error:
            log.exception("device %s failed", device, exc_info=error)
            failure = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>")
            reply = Message(failure, reply_to=task.message)
        if fate.kind == "clock":
            # What a machine would write whose clock is wrong.
            reply.metadata.__dict__["_created_at"] += self._faults.jump
            reply.metadata.__dict__["_ttl"] -= self._faults.jump
        if fate.kind == "cut":
            self._stop.wait(self._faults.seconds)
        now = time.monotonic()
        sent = Outgoing(now + fate.delay, node, task, reply, now - start)
        copies = {"lose": 0, "duplicate": 2}.get(fate.kind, 1)
        self._outgoing += [replace(sent) for _ in range(copies)]

    def _send(self) -> None:
        """Send the replies whose time has come."""
        now = time.monotonic()
        due = [each for each in self._outgoing if each.when <= now]
        self._outgoing = [each for each in self._outgoing if each.when > now]
        for each in due:
            try:
                each.node.send(each.task, each.reply, each.seconds)
            except httpx.HTTPStatusError as error:
                # The run is over, or it has the reply already: the node's work was in vain.
                log.info("a reply was not taken: %s", error.response.text[:200])


def read_numbers(text: str) -> list[int]:
    """Return device numbers such as `0-199` or `3,5,7-9`; raise ConfigError if they are none."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--devices takes numbers such as 0-199 or 3,5,7-9, not {text!r}")
        found += range(int(first), int(last or first) + 1)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"--devices {text!r} names no device, or one twice")
    return found
