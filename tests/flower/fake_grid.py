"""A grid in memory: nodes answer in this process, at once, and can be made to misbehave."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from sizewise.flower import node as flower_node

Tamper = Callable[[Message, Message], Message | None]
"""Gets a message and its reply, and returns the reply to deliver; None: none, for now."""


def honest(message: Message, reply: Message) -> Message | None:
    """Deliver what the node said."""
    return reply


@dataclass
class FakeNode:
    """A node: its app, what its owner set, what it keeps."""

    context: Context
    app: ClientApp = field(default_factory=flower_node.make_app)


class FakeGrid(Grid):
    """A federation in one process.

    Attributes:
        nodes: The nodes that are connected, by their id.
        tamper: What happens to replies on their way.
        asked: The types of all messages, with the node that got them.
        held: Replies that were not delivered yet, by message id.
        keys: The public key of each node, by its id.
    """

    def __init__(self, configs: Iterable[dict[str, Any]]) -> None:
        self.nodes: dict[int, FakeNode] = {}
        self.tamper: Tamper = honest
        self.asked: list[tuple[str, int]] = []
        self.held: dict[str, Message] = {}
        self.keys: dict[int, bytes] = {}
        self._replies: dict[str, Message] = {}
        self._next = 100
        # Flower tells every process what it is a part of; a message cannot be made without.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        for config in configs:
            self.connect(config)

    def connect(self, config: dict[str, Any]) -> int:
        """Connect a new node and return its id."""
        self._next += 1
        context = Context(1, self._next, config, RecordDict(), {})
        self.nodes[self._next] = FakeNode(context)
        return self._next

    def new_run(self) -> None:
        """Forget what nodes keep for a run, as Flower does when a server is started again."""
        for node in self.nodes.values():
            node.context.state = RecordDict()

    def release(self) -> None:
        """Deliver the replies that were held back."""
        self._replies |= self.held
        self.held = {}

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        node_id = message.metadata.dst_node_id
        name = f"message-{len(self.asked)}"
        message.metadata.__dict__["_message_id"] = name
        self.asked.append((message.metadata.message_type, node_id))
        node = self.nodes[node_id]
        try:
            reply = node.app(message, node.context)
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        given = self.tamper(message, reply)
        if given is None:
            self.held[name] = reply
        else:
            self._replies[name] = given
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError
