"""The Flower engine: every device is a node of its own, and the grid carries plans and tensors.

The federation's loop runs in a ServerApp and does not know. Each device is sent its own tensors,
and updates are merged in the order of the plans, so the bits are those of the in-process engine.
What devices remember stays with them; the server keeps its hash, to know which version counts.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from sizewise.common.structure import plain
from sizewise.config import Config
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import load_partition
from sizewise.engines import Outcome
from sizewise.engines.device_runner import DeviceRunner, refusal
from sizewise.engines.local import LocalEngine
from sizewise.errors import EngineError, TooFewUpdates, UpdateRefused
from sizewise.exchange.plan import Plan, Refusal, Update
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, cut, size_in_bytes
from sizewise.families.base import Method
from sizewise.flower import replies as flower_replies
from sizewise.flower import wire
from sizewise.flower.journal import Journal
from sizewise.flower.metrics import Metrics
from sizewise.flower.own_data import told
from sizewise.flower.roster import Member, Roster
from sizewise.training.evaluation import Score

WINDOW = 8
"""Updates that may wait here for an earlier, slower one; others wait in the SuperLink."""

JOINING = 30.0
"""Seconds that a round waits for nodes that just came to say who they are."""

GRACE = 60.0
"""Seconds for which a reply is kept beyond its deadline, so that a late one is seen as late."""

ABSENT = "no node of this device is connected"
UNSENT = "the SuperLink did not take the message for it"
BUSY = "its node has not answered since an earlier round"
LATE = "it did not answer before the deadline"
SPARE = "enough other devices had answered"


class FlowerEngine:
    """Trains devices on the nodes of a Flower federation; its journal says what became of them."""

    validates = False

    def __init__(self, grid: Grid, poll: float = 0.5) -> None:
        self.journal, self.metrics = Journal(), Metrics()
        self.roster = Roster(grid, self.journal, poll)
        self._grid, self._poll = grid, poll
        # Messages that were given up, in case that a reply comes after all.
        self._overdue: dict[str, tuple[Plan, int]] = {}

    def open(self, config: Config, method: Method, dataset: Dataset, partition: str) -> None:
        """Take over the run: its config, its method and data, and the file of its partition."""
        shards = load_partition(partition)
        self._policy, self._method = config.engine.flower, method
        self._sizes = shards.sizes()
        self._here = LocalEngine(DeviceRunner(method, dataset, shards))
        # A node with data of its own has to see it as all others see theirs.
        self._common = {"config": config.to_dict(), "data": plain(told(dataset))}
        self.journal.open(Path(partition).parent)
        self.metrics.open(Path(partition).parent)

    def train(self, state: State, plans: Sequence[Plan]) -> Iterator[Outcome]:
        """Yield what each plan's device sent back, in the order of the plans."""
        self._collect_overdue()
        self.roster.refresh(JOINING)
        members, policy = self.roster.members, self._policy
        deadline = time.monotonic() + policy.deadline
        texts = [json.dumps(plain(plan)) for plan in plans]
        sent: dict[str, int] = {}  # Numbers of the plans that are out, in their order.
        outcomes: dict[int, Outcome] = {}
        for number, plan in enumerate(plans):
            went = self._hand_out(plan, texts[number], members, state)
            if isinstance(went, Refusal):
                outcomes[number] = went
            else:
                sent[went] = number
        window = WINDOW if policy.enough is None else len(plans)
        given = updates = 0
        refused: dict[int, str] = {}
        while given < len(plans):
            if given in outcomes:
                outcome = outcomes.pop(given)
                received = size_in_bytes(outcome.tensors) if isinstance(outcome, Update) else 0
                self.metrics.answered(plans[given].device, outcome, received)
                if isinstance(outcome, Refusal):
                    refused[outcome.device] = outcome.reason
                yield outcome
                given += 1
                continue
            # After the deadline, one last look at each in turn.
            expired = time.monotonic() >= deadline
            near = [name for name, number in sent.items() if number < given + window]
            asked = near[:1] if expired else near
            for reply in self._grid.pull_messages(asked):
                number = sent.pop(reply.metadata.reply_to_message_id)
                plan = plans[number]
                outcomes[number] = self._read(reply, plan, texts[number], members, state)
                updates += isinstance(outcomes[number], Update)
            spare = policy.enough is not None and updates >= policy.enough
            now = self.roster.members
            for message_id in sent.keys() & (sent if spare else asked):
                plan = plans[sent[message_id]]
                gone = now.get(plan.device) != members[plan.device]
                if spare or gone or expired:
                    reason = SPARE if spare else flower_replies.GONE if gone else LATE
                    outcomes[sent.pop(message_id)] = refusal(plan, reason)
                    self._overdue[message_id] = plan, members[plan.device].node
            self.metrics.write(len(now))
            if given not in outcomes:
                time.sleep(self._poll)
                self.roster.refresh()
        self.metrics.write(len(self.roster.members), now=True)
        if updates < min(policy.minimum, len(plans)):
            raise self._abandoned(plans[0].round + 1, updates, refused)

    def _abandoned(self, number: int, updates: int, refused: dict[int, str]) -> TooFewUpdates:
        """Note a round that does not count, of which nothing else will tell; return the error."""
        self.journal.note("abandoned", 0, round=number, updates=updates, refused=refused)
        return TooFewUpdates(
            f"round {number} got {updates} of at least {self._policy.minimum} updates; see "
            f"nodes.jsonl, connect more nodes, raise engine.flower.deadline or lower "
            f"engine.flower.minimum, and start it again"
        )

    def _hand_out(
        self, plan: Plan, text: str, members: dict[int, Member], state: State
    ) -> str | Refusal:
        """Send a plan to its device; return the message's id, or why nothing was sent."""
        member = members.get(plan.device)
        if member is None:
            return refusal(plan, ABSENT)
        if member.node in {node for _, node in self._overdue.values()}:
            return refusal(plan, BUSY)
        tensors = cut(state.tensors, self._method.submodels.view(plan.submodel))
        tensors |= self._method.payload(state, plan)
        order = {"plan": text, "memory": _version(state, plan.device)}
        self.metrics.asked(plan.device, plan.round + 1, size_in_bytes(tensors))
        return self._send(member, MessageType.TRAIN, order, tensors) or refusal(plan, UNSENT)

    def _send(
        self, member: Member, kind: str, order: dict[str, Any], tensors: Tensors
    ) -> str | None:
        """Send work to a node; return the message's id, None if the SuperLink does not take it."""
        content = RecordDict(
            {"order": wire.write({**self._common, **order}), "tensors": wire.pack(tensors)}
        )
        ttl = self._policy.deadline + GRACE
        ids = list(self._grid.push_messages([Message(content, member.node, kind, ttl=ttl)]))
        return ids[0] or None if ids else None

    def _read(
        self, reply: Message, plan: Plan, text: str, members: dict[int, Member], state: State
    ) -> Outcome:
        member = members[plan.device]
        samples = 0 if member.own_data else int(self._sizes[plan.device])
        outcome, forgot = flower_replies.read(
            reply, plan, text, member, self._method, state, samples
        )
        if forgot:
            reason = "it no longer has what it remembered of earlier rounds, and began anew"
            self.journal.note(
                "forgot", member.node, device=plan.device, round=plan.round + 1, reason=reason
            )
        return outcome

    def settle(self) -> None:
        """Wait until no node is busy with what was given up, but no longer than for a round."""
        end = time.monotonic() + self._policy.deadline
        while self._overdue and time.monotonic() < end:
            self._collect_overdue()
            time.sleep(self._poll)

    def _collect_overdue(self) -> None:
        """Note the replies that came after their round had ended."""
        if not self._overdue:
            return
        for reply in self._grid.pull_messages(list(self._overdue)):
            plan, node = self._overdue.pop(reply.metadata.reply_to_message_id)
            reason = "its reply came when the round was over; it is not merged"
            if reply.has_error():
                reason = f"no reply came: {reply.error.reason or 'no reason given':.300}"
            event = "failed" if reply.has_error() else "late"
            self.journal.note(event, node, device=plan.device, round=plan.round + 1, reason=reason)

    def evaluate(self, state: State) -> dict[str, Score]:
        """Score every deployed model on the test set.

        The server does it, except for models that devices keep for themselves.
        """
        models = self._method.deploy(state)
        owners = {size: model.owner for size, model in models.items() if model.owner is not None}
        if not owners:
            return self._here.evaluate(state)
        members = self.roster.members
        sent: dict[str, str] = {}
        for size, device in owners.items():
            if device in members:
                order = {"size": size, "device": device, "memory": _version(state, device)}
                order["metadata"] = dict(state.metadata)
                message_id = self._send(members[device], MessageType.EVALUATE, order, state.tensors)
                if message_id is not None:
                    sent[message_id] = size
        scores: dict[str, Score] = {}
        deadline = time.monotonic() + self._policy.deadline
        while sent and time.monotonic() < deadline:
            for reply in self._grid.pull_messages(list(sent)):
                size = sent.pop(reply.metadata.reply_to_message_id)
                try:
                    scores[size] = self._score(reply)
                except UpdateRefused as error:
                    self.journal.note("unscored", reply.metadata.src_node_id, reason=str(error))
            time.sleep(self._poll)
        if not scores:
            raise EngineError("no node scored its own model; see nodes.jsonl, then start it again")
        return {size: scores[size] for size in owners if size in scores}

    def validate(self, state: State, rows: Mapping[str, Tensor]) -> dict[str, Score]:
        """Raise: what devices validate on does not leave them."""
        raise NotImplementedError

    def _score(self, reply: Message) -> Score:
        if reply.has_error():
            raise UpdateRefused(f"{reply.error.reason!s:.300}")
        score = wire.read_as(Score, reply.content, "score")
        metric, sets = self._method.task.metric, max(1, len(self._method.task.silos))
        numbers = (*score.counts, score.loss_sum)
        if score.samples < 1 or not all(map(math.isfinite, numbers)):
            raise UpdateRefused(f"it reports {score.samples} samples and {numbers!r:.99}")
        try:
            values = score.values(metric, sets)
        except (IndexError, ValueError, RuntimeError):
            values = [math.nan]
        if not all(-1 <= value <= 1 for value in values):
            raise UpdateRefused(f"{score.counts!r:.99} cannot be what {metric} counts")
        return score

    def close(self) -> None:
        """Nothing to let go of: nodes belong to Flower."""


def _version(state: State, device: int) -> str:
    """Return the hash of what a device remembers, "" if it is nothing."""
    if device not in state.devices:
        return ""
    return bytes(state.devices[device][flower_replies.RECEIPT].tolist()).hex()
