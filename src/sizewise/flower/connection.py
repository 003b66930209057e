"""A node's line to the SuperLink: the part of a SuperNode that talks, and nothing else.

It uses the client of Flower's own Fleet API, as `flower-supernode` does. One thread asks for
messages and says every while that the node is alive, so a process that has torch imported can be
forked at any time.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from sizewise.errors import ConfigError, EngineError

App = Callable[[Message, Context], Message]
"""What a ClientApp is: a message in, its reply out."""

PATIENCE = 60.0
"""Seconds to wait for a part of a message, or for a SuperLink that is being restarted."""


@dataclass(frozen=True)
class Place:
    """Where a SuperLink is, and who a node is to it.

    Attributes:
        superlink: Its host and port.
        insecure: Whether to do without TLS.
        root_certificates: A file with the authority to trust; None: those of the system.
        key: A file with the node's private key; None: a new one, which anybody could make.
        heartbeat: Seconds between two signs of life; after two that are missed, it is gone.
    """

    superlink: str
    insecure: bool = False
    root_certificates: Path | None = None
    key: Path | None = None
    heartbeat: float = 30.0

    def private_key(self) -> ec.EllipticCurvePrivateKey:
        """Return the node's private key; raise ConfigError if there is none in the file."""
        if self.key is None:
            return generate_key_pairs()[0]
        try:
            found = load_ssh_private_key(self.key.expanduser().read_bytes(), None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{str(self.key)!r} holds no private key: {error}") from None
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                f"{str(self.key)!r} is no key on an elliptic curve; make one with "
                f"`ssh-keygen -t ecdsa -b 384 -N '' -f {self.key}`"
            )
        return found


@dataclass(frozen=True)
class Task:
    """A message that waits for a node: what it is, without its content."""

    message: Message
    tree: ObjectTree

    @property
    def kind(self) -> str:
        """What is asked for."""
        return self.message.metadata.message_type

    @property
    def run(self) -> int:
        """The Flower run that it belongs to."""
        return self.message.metadata.run_id


class Connection:
    """A registered node.

    Attributes:
        node: Its number in the SuperLink; 0 before it joined.
        settings: What its owner set, as in `--node-config`.
    """

    def __init__(self, place: Place, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.node = 0
        self._place, self._key = place, place.private_key()
        self._client = self._connect(None)
        self._beaten = 0.0

    def _connect(self, retry: RetryInvoker | None) -> FleetHttpClient:
        roots = self._place.root_certificates
        try:
            certificates = None if roots is None else roots.expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"the certificates {str(roots)!r} cannot be read: {error}") from None
        return FleetHttpClient.from_server_address(
            self._place.superlink,
            self._place.insecure,
            certificates,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(self._key, self._key.public_key()),
            ],
            retry_invoker=retry,
        )

    def reconnect(self) -> None:
        """Use a line of its own from now on, as a forked process has to, and be patient on it."""
        retry = make_simple_http_retry_invoker()
        retry.max_time = PATIENCE
        self._client = self._connect(retry)

    def join(self) -> None:
        """Become a node of the SuperLink; raise EngineError if it says no."""
        public = public_key_to_bytes(self._key.public_key())
        try:
            if self._place.key is None:
                self._client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
            request = ActivateNodeRequest(
                public_key=public, heartbeat_interval=self._place.heartbeat
            )
            self.node = self._client.ActivateNode(request).node_id
        except httpx.HTTPStatusError as error:
            advice = "register its key with `flwr supernode register`"
            raise EngineError(
                f"the SuperLink at {self._place.superlink} does not take this node: "
                f"{error.response.text[:300]}; {wrong_clock(error.response) or advice}"
            ) from None
        self._beaten = time.monotonic()

    def beat(self) -> bool:
        """Say that the node is alive, if that is due; return whether it is still known."""
        if time.monotonic() - self._beaten < self._place.heartbeat / 2:
            return True
        request = SendNodeHeartbeatRequest(
            node=self._self, heartbeat_interval=self._place.heartbeat
        )
        self._beaten = time.monotonic()
        return self._client.SendNodeHeartbeat(request).success

    @property
    def _self(self) -> Node:
        return Node(node_id=self.node)

    def receive(self) -> Task | None:
        """Return the next message, without its content; None if there is none."""
        response = self._client.PullMessages(PullMessagesRequest(node=self._self))
        if not response.messages_list:
            return None
        message = message_from_proto(response.messages_list[0])
        return Task(message, response.message_object_trees[0])

    def fetch(self, task: Task) -> Message:
        """Return a message with its content."""
        contents = {
            part.object_id: self._pull(task, part.object_id)
            for part in iterate_object_tree(task.tree)
        }
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._self, run_id=task.run, message_object_id=task.tree.object_id
            )
        )
        message = inflate_object_from_contents(
            task.tree.object_id, contents, keep_object_contents=False
        )
        if not isinstance(message, Message):
            raise EngineError(f"the SuperLink sent {type(message).__name__}, expected a message")
        message.metadata.__dict__["_message_id"] = task.tree.object_id
        return message

    def _pull(self, task: Task, part: str) -> bytes:
        request = PullObjectRequest(node=self._self, run_id=task.run, object_id=part)
        end = time.monotonic() + PATIENCE
        while True:
            response = self._client.PullObject(request)
            if response.object_found and response.object_available:
                return response.object_content
            if not response.object_found or time.monotonic() > end:
                raise EngineError(f"a part of the message never came: {part}")
            time.sleep(0.1)

    def app_folder(self, task: Task) -> Path:
        """Return where the app that the message belongs to is now installed."""
        from flwr.cli.install import install_from_fab
        from flwr.common.config import get_project_dir

        run = self._client.GetRun(GetRunRequest(node=self._self, run_id=task.run)).run
        request = GetFabRequest(node=self._self, hash_str=run.fab_hash, run_id=task.run)
        fab = self._client.GetFab(request).fab
        install_from_fab(fab.content, skip_prompt=True)
        return get_project_dir(run.fab_id, run.fab_version, fab.hash_str)

    def answer(self, task: Task, app: App) -> Message:
        """Return what the app replies to a message."""
        self.identify(task)
        context = Context(task.run, self.node, self.settings, RecordDict(), {})
        return app(self.fetch(task), context)

    def identify(self, task: Task) -> None:
        """Tell Flower what this process is a part of; no message can be made without."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = task.run, self.node, 1

    def send(self, task: Task, reply: Message, seconds: float) -> int:
        """Send the reply to a task, which took so long; return its bytes."""
        date(reply, task, seconds)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        sent = 0
        with no_object_id_recompute():
            response = self._client.PushMessages(
                PushMessagesRequest(
                    node=self._self,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[seconds],
                )
            )
            wanted = set(response.objects_to_push)
            for name, part in get_all_nested_objects(reply).items():
                if name in wanted:
                    content = part.deflate()
                    sent += len(content)
                    self._client.PushObject(
                        PushObjectRequest(
                            node=self._self,
                            run_id=reply.metadata.run_id,
                            object_id=name,
                            object_content=content,
                            session_id=response.session_id,
                        )
                    )
        return sent

    def leave(self) -> None:
        """Say good-bye, if the SuperLink is there to hear it."""
        try:
            self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node))
            if self._place.key is None:
                self._client.UnregisterNode(UnregisterNodeFleetRequest(node_id=self.node))
        except (httpx.HTTPError, RuntimeError):
            pass
        self._client.close()


def date(reply: Message, task: Task, seconds: float) -> None:
    """Date a reply by the SuperLink's clock: the one of a board may have jumped.

    A reply must not outlive what it replies to, and Flower tells so by the times of both.
    """
    asked, made = task.message.metadata, reply.metadata
    made.__dict__["_created_at"] = asked.created_at + seconds
    made.__dict__["_ttl"] = asked.ttl - seconds


AHEAD, BEHIND = 5, 300
"""Seconds by which a SuperLink lets the clocks of nodes be wrong that sign their requests."""


def wrong_clock(response: httpx.Response) -> str:
    """Return what to do about this machine's clock, if it is too wrong for a SuperLink; else ""."""
    told = response.headers.get("date")
    if told is None:
        return ""
    ahead = time.time() - parsedate_to_datetime(told).timestamp()
    if -BEHIND < ahead < AHEAD:
        return ""
    where = "ahead of" if ahead > 0 else "behind"
    return (
        f"the clock of this machine is {abs(ahead):,.0f} s {where} the SuperLink's, and may be "
        f"{AHEAD} s ahead or {BEHIND} s behind; set it, for instance by `timedatectl set-ntp true`"
    )
