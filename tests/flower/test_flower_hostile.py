"""Hostile or broken replies are refused with a reason, and never touch the server's tensors."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sizewise import config as configs
from sizewise.exchange.state import State
from sizewise.runs import session

pytest.importorskip("flwr")

from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from sizewise.exchange.plan import Plan
from sizewise.flower import wire
from sizewise.flower.engine import FlowerEngine
from sizewise.runs.federation import Federation, RoundLog

VICTIM = 1
CONFIG = configs.from_dict(
    {
        "rounds": 3,
        "model": {"name": "mlp", "args": {"hidden": [8, 8]}},
        "data": {"train_limit": 90, "test_limit": 30},
        "fleet": {"devices": 3, "per_round": 3},
        # Rolling windows: in another round, or for another device, shapes are the same.
        "method": {"name": "fedrolex", "widths": [0.5]},
        "recipe": {"batch": 8},
    }
)


@dataclass
class Bench:
    """A federation whose second device can be made to lie."""

    federation: Federation
    grid: FakeGrid
    state: State

    def merged(self, change: Callable[[Message], Message] | None) -> tuple[State, list[str]]:
        """Do a round with a changed reply; return the state after it and the reasons to refuse.

        Without a change, the device is left out.
        """

        def tamper(message: Message, reply: Message) -> Message:
            is_victim = message.metadata.dst_node_id == 101 + VICTIM
            if message.metadata.message_type == "train" and is_victim and change is not None:
                return change(reply)
            return reply

        self.grid.tamper = tamper
        log = RoundLog()
        plans = list(self.federation.plans(self.state, 0, log))
        if change is None:
            plans = [plan for plan in plans if plan.device != VICTIM]
        method = self.federation.method
        state = method.merge(self.state, self.federation.updates(self.state, plans, log))
        return state, [line["refused"] for line in log.lines if line["refused"] is not None]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Any:
    grid = FakeGrid({"partition-id": n} for n in range(3))
    engine = FlowerEngine(grid, poll=0)
    folder = tmp_path_factory.mktemp("hostile") / "run"
    with session.started(CONFIG, folder, engine=engine) as federation:
        yield Bench(federation, grid, federation.method.setup())


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Message], Message]:
    """Return a change to the tensors of a reply."""

    def apply(reply: Message) -> Message:
        held = wire.unpack(reply.content["tensors"])
        change(held)
        reply.content["tensors"] = wire.pack(held)
        return reply

    return apply


def indexed(change: Callable[[list[Any]], Any], extra: bytes = b"") -> Callable[[Message], Message]:
    """Return a change to the index of a reply's tensors, and bytes to append to them."""

    def apply(reply: Message) -> Message:
        (array,) = reply.content["tensors"].values()
        start = 4 + int.from_bytes(array.data[:4], "little")
        index = json.loads(array.data[4:start])
        index = change(index) or index
        text = index if isinstance(index, bytes) else json.dumps(index).encode()
        data = len(text).to_bytes(4, "little") + text + array.data[start:] + extra
        return arrays(data=data)(reply)

    return apply


def arrays(**fields: Any) -> Callable[[Message], Message]:
    """Return a change to the array that holds all tensors."""

    def apply(reply: Message) -> Message:
        ((name, old),) = reply.content["tensors"].items()
        parts = {key: getattr(old, key) for key in ("dtype", "shape", "stype", "data")}
        reply.content["tensors"] = ArrayRecord({name: Array(**{**parts, **fields})})
        return reply

    return apply


def typed(kind: str) -> Callable[[list[Any]], None]:
    return lambda index: index[0].__setitem__(1, kind)


def shaped(*shape: Any) -> Callable[[list[Any]], None]:
    return lambda index: index[0].__setitem__(2, list(shape))


def report(**fields: Any) -> Callable[[Message], Message]:
    """Return a change to the report of a reply."""

    def apply(reply: Message) -> Message:
        said = json.loads(reply.content["report"]["json"])
        reply.content["report"] = wire.write({**said, **fields})
        return reply

    return apply


def content(**records: Any) -> Callable[[Message], Message]:
    """Return a change to the records of a reply."""

    def apply(reply: Message) -> Message:
        kept = {key: value for key, value in reply.content.items() if key not in records}
        added = {key: value for key, value in records.items() if value is not None}
        reply.content = RecordDict({**kept, **added})
        return reply

    return apply


def failed(code: int) -> Callable[[Message], Message]:
    def apply(reply: Message) -> Message:
        return_message = Message(Error(code, "<class 'MemoryError'>:<''>"), reply_to=reply)
        return_message.metadata.__dict__["_reply_to_message_id"] = (
            reply.metadata.reply_to_message_id
        )
        return return_message

    return apply


def from_elsewhere(reply: Message) -> Message:
    reply.metadata.__dict__["_src_node_id"] = 103
    return reply


def first(held: dict[str, torch.Tensor]) -> str:
    return next(iter(held))


def spoil(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(held: dict[str, torch.Tensor]) -> None:
        held[first(held)].view(-1)[3] = value

    return change


HOSTILE: dict[str, tuple[Callable[[Message], Message], str]] = {
    "wrong shape": (
        tensors(lambda held: held.update({first(held): torch.zeros(1, 3)})),
        "expected torch.float32 of shape",
    ),
    "transposed": (
        tensors(lambda held: held.update({first(held): held[first(held)].T})),
        "expected torch.float32 of shape",
    ),
    "wrong dtype": (
        tensors(lambda held: held.update({first(held): held[first(held)].half()})),
        "is torch.float16",
    ),
    "NaN": (tensors(spoil(float("nan"))), "not finite"),
    "infinite": (tensors(spoil(float("-inf"))), "not finite"),
    "missing tensor": (tensors(lambda held: held.pop(first(held))), "is missing"),
    "no record of tensors": (content(tensors=None), "is missing"),
    "no tensors": (tensors(lambda held: held.clear()), "is missing"),
    "extra tensor": (
        tensors(lambda held: held.update(evil=torch.zeros(2))),
        "'evil' was never sent to this device",
    ),
    "far too large": (
        tensors(lambda held: held.update({first(held): torch.zeros(3_000_000)})),
        "it sends 12,0",
    ),
    "bytes that nobody describes": (indexed(lambda index: None, b"\0" * 5), "bytes, and"),
    "tensors without their bytes": (indexed(lambda index: index.append(index[0])), "twice"),
    "a longer tensor than came": (indexed(shaped(999, 9)), "its index of tensors is about"),
    "a huge shape without bytes": (indexed(shaped(2**40, 2**40)), "its index of tensors is about"),
    "a shape beyond all numbers": (indexed(shaped(2**60)), "no name, type and shape"),
    "a negative shape": (indexed(shaped(-1, 4)), "no name, type and shape"),
    "a shape of many dimensions": (indexed(shaped(*[1] * 99)), "no name, type and shape"),
    "a shape of truths": (indexed(shaped(True, 4)), "no name, type and shape"),
    "an entry with an offset": (indexed(lambda index: index[0].append(0)), "no name, type and"),
    "an unknown dtype": (indexed(typed("object")), "of type 'object'"),
    "another dtype of the same size": (indexed(typed("int32")), "is torch.int32"),
    "an index that is not JSON": (indexed(lambda index: b"["), "not a JSON list"),
    "an index of another kind": (indexed(lambda index: b"{}"), "not a JSON list"),
    "an index nested too deep": (indexed(lambda index: b"[" * 100_000), "not a JSON list"),
    "an index longer than the message": (arrays(data=b"\xff\xff\xff\x7f[]"), "is longer than"),
    "no index": (arrays(data=b""), "is longer than"),
    "a pickle": (arrays(stype="pickle"), "one 'raw' array"),
    "a npy file": (arrays(stype="numpy.ndarray"), "one 'raw' array"),
    "two arrays": (
        content(tensors=ArrayRecord({name: Array("uint8", (0,), "raw", b"") for name in "ab"})),
        "one 'raw' array",
    ),
    "wrong round": (report(round=1), "is of round 2, expected that of round 1"),
    "another device": (report(device=2), "is of device 2, expected that of device 1"),
    "another plan": (report(plan="0" * 64), "follows another plan"),
    "another node": (from_elsewhere, "came from another node"),
    "rows that were not asked for": (report(rows={"nothing": [0]}), "rows of 'nothing' came"),
    "rows that are not there": (report(rows={"head.weight": [99]}), "expected distinct rows"),
    "more samples than it has": (report(samples=10**9), "samples, expected 30"),
    "no samples": (report(samples=0), "it reports 0 samples"),
    "no steps": (report(steps=0), "it reports 0 steps"),
    "an infinite loss": (report(loss=float("inf")), "a loss of inf"),
    "negative seconds": (report(seconds=-1.0), "-1.0 seconds"),
    "text for a number": (report(samples="many"), "must be a whole number"),
    "an unknown key": (report(admin=True), "unknown key"),
    "memory that is no hash": (report(memory="../../etc/passwd"), "not a hash"),
    "no report": (content(report=None), "its record 'report' is missing"),
    "another record": (content(more=ConfigRecord()), "'more' came, which nobody asked for"),
    "tensors of another kind": (content(tensors=ConfigRecord()), "not an array record"),
    "a report of another kind": (content(report=ArrayRecord()), "no text of reasonable length"),
    "a report that is not JSON": (content(report=ConfigRecord({"json": "{"})), "not a JSON object"),
    "a report nested too deep": (
        content(report=ConfigRecord({"json": "[" * 100_000})),
        "not a JSON object",
    ),
    "a failure": (failed(2), "its ClientApp failed: <class 'MemoryError'>"),
    "a dead node": (failed(5), "its node left"),
    "a dead client": (failed(8), "stopped responding"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_reply_is_refused_and_changes_nothing(name: str, bench: Bench) -> None:
    change, reason = HOSTILE[name]
    before = {key: tensor.clone() for key, tensor in bench.state.tensors.items()}
    expected, none = bench.merged(None)
    assert none == []
    state, refused = bench.merged(change)
    assert len(refused) == 1
    assert reason in refused[0]
    assert state.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(state.tensors[key], expected.tensors[key]) for key in before)
    assert all(torch.equal(bench.state.tensors[key], before[key]) for key in before)


def test_an_honest_reply_does_change_something(bench: Bench) -> None:
    expected, _ = bench.merged(None)
    state, refused = bench.merged(lambda reply: reply)
    assert refused == []
    assert any(not torch.equal(state.tensors[k], expected.tensors[k]) for k in state.tensors)


def test_another_devices_view_is_refused_though_its_shapes_fit(bench: Bench) -> None:
    """FedRolex's windows have equal shapes: a reply to an older window tells by its plan."""
    kept: list[Message] = []

    def keep(reply: Message) -> Message:
        kept.append(reply)
        return reply

    bench.merged(keep)
    old = kept[0].content["report"]["json"]
    plans = list(bench.federation.plans(bench.state, 1, RoundLog()))
    shapes: dict[int, Any] = {}
    for number, plan in enumerate((plans[VICTIM], *bench_plans(bench))):
        view = bench.federation.method.submodels.view(plan.submodel)
        shapes[number] = {k: place.shape(bench.state.tensors) for k, place in view.items()}
    assert shapes[0] == shapes[1 + VICTIM]
    # The same content, relabelled as if it were of the round that is asked for now.
    said = {**json.loads(old), "round": 1}

    def replay(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 102:
            tensors = kept[0].content["tensors"]
            reply.content = RecordDict({"report": wire.write(said), "tensors": tensors})
        return reply

    bench.grid.tamper = replay
    log = RoundLog()
    list(bench.federation.updates(bench.state, plans, log))
    assert [line["refused"] for line in log.lines if line["refused"]] == [
        "the update follows another plan than the one that was sent"
    ]


def bench_plans(bench: Bench) -> list[Plan]:
    return list(bench.federation.plans(bench.state, 0, RoundLog()))


def test_a_node_refuses_what_is_not_for_it(bench: Bench) -> None:
    """A server's mistake, or another server: the node answers with the reason."""
    plan = bench_plans(bench)[0]
    members = bench.federation.engine.roster.members  # type: ignore[attr-defined]
    wrong = {plan.device: members[VICTIM]}
    engine = bench.federation.engine
    bench.grid.tamper = lambda message, reply: reply
    text = json.dumps(configs.plain(plan))
    sent = engine._hand_out(plan, text, wrong, bench.state)  # type: ignore[attr-defined]
    (reply,) = bench.grid.pull_messages([sent])
    outcome = engine._read(reply, plan, text, wrong, bench.state)  # type: ignore[attr-defined]
    assert outcome.reason == "it is device 1, and the plan is for device 0"
