"""The roster: which Flower node is which device, and whether it runs what the server runs.

Every node is asked once. When two nodes say that they are the same device, the first is believed
for as long as it is connected, and the second is refused: most often somebody gave two machines one
number. A node that was restarted under a new id takes the place of its old self once Flower misses
that, which takes a minute after a crash and no time after an orderly end.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from sizewise import methods
from sizewise.config import Config
from sizewise.errors import EngineError, UpdateRefused
from sizewise.flower import wire
from sizewise.flower.identity import Software, mismatch, read_keys, software
from sizewise.flower.journal import Journal

ANNOUNCE = f"{MessageType.QUERY}.announce"
ASK_AGAIN = 15.0
"""Seconds after which a node that failed to say who it is is asked again."""

SHOWN = 5
"""Nodes whose reason an error names; nodes.jsonl has all of them."""


@dataclass(frozen=True)
class Member:
    """A node that is some device."""

    node: int
    device: int
    memory: int | None
    own_data: bool


class Roster:
    """The nodes that are connected."""

    def __init__(self, grid: Grid, journal: Journal, poll: float) -> None:
        self._grid, self._journal, self._poll = grid, journal, poll
        self._known: dict[int, Member] = {}
        self._rivals: dict[int, Member] = {}  # Nodes whose device is another node already.
        self._asked: dict[str, int] = {}
        self._failed: dict[int, tuple[float, str]] = {}  # Until when, and why.
        self._model, self._weights, self._software = "", "", Software()
        self._keys: dict[int, bytes] | None = None

    def expect(self, config: Config) -> None:
        """Take only nodes that run what this process runs, for the model of a config.

        And, where the config names a folder of keys, only with the key of their device.
        """
        held = methods.find(config.method.name).holds_base
        self._model = config.model.name
        self._weights = (config.model.weights or "") if held else ""
        self._software = software(self._model, self._weights)
        self._keys = read_keys(config.engine.flower.keys)

    @property
    def members(self) -> dict[int, Member]:
        """The node of each device that is there, by device number."""
        return {member.device: member for member in self._known.values()}

    def refresh(self, patience: float = 0.0) -> None:
        """Learn who came and who left; wait for those who were just asked, but not for long."""
        end = time.monotonic() + patience
        while True:
            self._look()
            self._listen()
            if not self._asked or time.monotonic() >= end:
                return
            time.sleep(self._poll)

    def wait(self, count: int, seconds: float, least: int) -> None:
        """Wait until so many devices are there; raise EngineError if fewer than the least come."""
        end = time.monotonic() + seconds
        self.refresh()
        while len(self.members) < count:
            if time.monotonic() >= end:
                if len(self.members) >= least:
                    return
                raise EngineError(
                    f"{len(self.members)} of {count} devices are connected after {seconds:g} s; "
                    f"start more SuperNodes, or lower engine.flower.nodes"
                    f"{''.join(f'; {reason}' for reason in self._obstacles())}"
                )
            time.sleep(self._poll)
            self.refresh()

    def _obstacles(self) -> Iterator[str]:
        """Yield why nodes that are connected are no members; a few will do."""
        reasons = [self._conflict(rival) for rival in self._rivals.values()]
        reasons += [f"node {node}: {reason}" for node, (_, reason) in self._failed.items()]
        yield from reasons[:SHOWN]

    def _look(self) -> None:
        """Forget the nodes that left, ask the new ones who they are."""
        present = set(self._grid.get_node_ids())
        for node in self._known.keys() - present:
            self._journal.note("left", node, device=self._known.pop(node).device)
        rivals, self._rivals = self._rivals, {}
        for member in rivals.values():
            if member.node in present:
                self._admit(member, known=True)
        self._asked = {m: node for m, node in self._asked.items() if node in present}
        self._failed = {node: why for node, why in self._failed.items() if node in present}
        now = time.monotonic()
        waiting = {node for node, (when, _) in self._failed.items() if now < when}
        met = self._known.keys() | self._rivals.keys() | set(self._asked.values()) | waiting
        for node in sorted(present - met):
            order = wire.write({"model": self._model, "weights": self._weights})
            message = Message(RecordDict({"order": order}), node, ANNOUNCE)
            self._asked |= dict.fromkeys(self._grid.push_messages([message]), node)

    def _listen(self) -> None:
        """Take in what nodes said of themselves."""
        replies = self._grid.pull_messages(list(self._asked)) if self._asked else ()
        for reply in replies:
            node = self._asked.pop(reply.metadata.reply_to_message_id)
            try:
                if reply.has_error():
                    raise UpdateRefused(f"{reply.error.reason!s:.300}")
                said = wire.read_as(wire.Announcement, reply.content, "announcement")
                if said.refusal is not None or said.device < 0:
                    raise UpdateRefused(f"{said.refusal!s:.300}")
                self._check(node, said)
            except UpdateRefused as error:
                self._failed[node] = time.monotonic() + ASK_AGAIN, str(error)
                self._journal.note("unusable", node, reason=str(error))
                continue
            self._failed.pop(node, None)
            self._admit(Member(node, said.device, said.memory, said.own_data))

    def _check(self, node: int, said: wire.Announcement) -> None:
        """Raise UpdateRefused if a node runs something else, or has the key of another device."""
        if self._software != Software() and (odd := mismatch(said.software, self._software)):
            raise UpdateRefused(f"device {said.device}: {odd}")
        if self._keys is None:
            return
        key = {info.node_id: info.public_key for info in self._grid.get_nodes()}.get(node)
        if key is None or key != self._keys.get(said.device):
            raise UpdateRefused(
                f"it says that it is device {said.device}, whose key is another one; "
                f"see engine.flower.keys"
            )

    def _admit(self, member: Member, known: bool = False) -> None:
        """Take a node for its device, unless another one is; one that is known is not noted."""
        if member.device not in self.members:
            self._known[member.node] = member
            self._journal.note("joined", member.node, device=member.device, memory=member.memory)
            return
        self._rivals[member.node] = member
        if not known:
            reason = self._conflict(member)
            self._journal.note("refused", member.node, device=member.device, reason=reason)

    def _conflict(self, rival: Member) -> str:
        return (
            f"node {rival.node} says that it is device {rival.device}, which node "
            f"{self.members[rival.device].node} is; give one of them another partition-id"
        )
