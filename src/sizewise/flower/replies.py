"""From a node's reply to an update, or to the reason why it is refused.

Whatever a node sends is checked against what it was asked for before it comes near the server's
tensors. The order matters: cheap checks that need no memory come first.
"""

import hashlib
import math
import re
from dataclasses import replace

import torch
from flwr.app import Message
from torch import Tensor

from sizewise.engines import FACTS, Outcome
from sizewise.engines.device_runner import refusal
from sizewise.errors import UpdateRefused
from sizewise.exchange import compression
from sizewise.exchange.plan import Plan, Update
from sizewise.exchange.rows import with_rows
from sizewise.exchange.state import State
from sizewise.exchange.traffic import Traffic
from sizewise.exchange.view import check, size_in_bytes, view_in_bytes
from sizewise.families.base import Method
from sizewise.flower import wire
from sizewise.flower.roster import Member

RECEIPT = "receipt"
"""The one tensor that the server keeps of a device's memory: its hash."""

GONE = "its node left while it was at work"

_FAILURES = {
    3: "its message expired before it was fetched",
    4: "its reply expired before it was fetched",
    5: GONE,
    8: "its ClientApp stopped responding",
}


def digest(plan: str) -> str:
    """Return the hash of a plan's text, by which a node says what it did."""
    return hashlib.sha256(plan.encode()).hexdigest()


def read(
    reply: Message,
    plan: Plan,
    text: str,
    member: Member,
    method: Method,
    state: State,
    samples: int,
) -> tuple[Outcome, bool]:
    """Return what a reply amounts to, and whether the device had to begin anew.

    The plan went to the member, as this text; `samples` is how many it has, 0 if that is unknown.
    """
    try:
        if reply.has_error():
            failure = f"its ClientApp failed: {reply.error.reason or 'no reason given':.300}"
            raise UpdateRefused(_FAILURES.get(reply.error.code, failure))
        if reply.metadata.src_node_id != member.node:
            raise UpdateRefused("the reply came from another node than was asked")
        if odd := reply.content.keys() - {"report", "tensors", "sample_payload"}:
            raise UpdateRefused(f"the record {min(odd)!r:.99} came, which nobody asked for")
        report = wire.read_as(wire.Report, reply.content, "report")
        _check_echo(report, plan, text)
        if report.refusal is not None:
            raise UpdateRefused(report.refusal[:500])
        _check_numbers(report, samples)
        traffic = method.traffic(plan, report.samples)
        told = _sample_payload(reply.content.get("sample_payload"), traffic)
        required = method.submodels.trained_names(plan) if traffic.returns else frozenset[str]()
        update = _update(report, reply.content.get("tensors"), plan, method, state, required)
        return replace(update, sample_payload=told), report.forgot
    except UpdateRefused as error:
        return refusal(plan, str(error)), False


def _check_echo(report: wire.Report, plan: Plan, text: str) -> None:
    """Raise UpdateRefused unless a report is on the work that was asked for."""
    rounds, devices = (report.round + 1, plan.round + 1), (report.device, plan.device)
    for what, (came, asked) in {"round": rounds, "device": devices}.items():
        if came != asked:
            raise UpdateRefused(f"the update is of {what} {came}, expected that of {what} {asked}")
    if report.plan != digest(text):
        raise UpdateRefused("the update follows another plan than the one that was sent")


def _check_numbers(report: wire.Report, samples: int) -> None:
    """Raise UpdateRefused unless a report's numbers make sense: they decide how much it counts."""
    if report.samples < 1 or (samples and report.samples != samples):
        raise UpdateRefused(f"it reports {report.samples:,} samples, expected {samples or 'some'}")
    if report.samples > 2**53:  # A larger one would swamp the mean, whatever the others are.
        raise UpdateRefused(f"it reports {report.samples:,} samples")
    good = report.steps >= 1 and report.seconds >= 0 and (report.peak_bytes or 0) >= 0
    if not good or not math.isfinite(report.loss) or not math.isfinite(report.seconds):
        raise UpdateRefused(
            f"it reports {report.steps} steps, a loss of {report.loss}, a peak of "
            f"{report.peak_bytes} bytes and {report.seconds} seconds, which cannot be"
        )
    if not re.fullmatch("([0-9a-f]{64})?", report.memory):
        raise UpdateRefused("it names its memory by something that is not a hash")


def _sample_payload(record: object, traffic: Traffic) -> dict[str, Tensor]:
    """Return what a device tells of its samples, if it is what it was asked for."""
    parcel, room = _parcel(record), size_in_bytes(traffic.up)
    if parcel.size > room:
        raise UpdateRefused(f"it shares {parcel.size:,} bytes, and was asked for {room:,}")
    told = parcel.tensors()
    traffic.check(told)
    return told


def _parcel(record: object) -> wire.Parcel:
    """Return the tensors of a record; none that is left out has none."""
    return wire.Parcel(wire.pack({}) if record is None else record)


def _update(
    report: wire.Report,
    record: object,
    plan: Plan,
    method: Method,
    state: State,
    required: frozenset[str],
) -> Update:
    parcel, view = _parcel(record), method.submodels.view(plan.submodel)
    recipe = method.task.recipe
    names = {compression.base_name(n) if recipe.upload != "full" else n for n in parcel.index}
    if extra := names - view.keys():
        raise UpdateRefused(f"tensor {min(extra)!r:.99} was never sent to this device")
    room = view_in_bytes(view, state.tensors)
    if parcel.size > room:
        raise UpdateRefused(f"it sends {parcel.size:,} bytes, and its view has {room:,}")
    if missing := required - names:
        raise UpdateRefused(f"tensor {min(missing)!r} is missing, which its plan trains")
    receipt = torch.tensor(list(bytes.fromhex(report.memory)), dtype=torch.uint8)
    remembered = {RECEIPT: receipt} if report.memory else {}
    facts = {name: getattr(report, name) for name in FACTS}
    update = Update(plan, parcel.tensors(), device_state=remembered, **facts)
    narrowed = with_rows(view, report.rows, state.tensors)
    whole = compression.decoded(update, view, state.tensors, recipe).tensors
    check(whole, narrowed, state.tensors)
    return update
