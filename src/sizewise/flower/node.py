"""The node's side of the Flower engine: a ClientApp that trains one device.

A node is told who it is by its owner, in `flower-supernode --node-config`:

    partition-id   the number of the device that it is
    memory         its budget for a training step, such as "20MB"; "free": what is left here, but
                   for what the process itself needs
    data           a folder or file of its own; without it, its share of the run's data set
    state-dir      a folder for what it remembers, so that it outlives a restart of the server

Torch is imported when there is something to train, not to tell the budget.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from sizewise.common.structure import parse_bytes, plain
from sizewise.engines import FACTS
from sizewise.errors import ConfigError, DataError, SizewiseError
from sizewise.flower import usage, wire
from sizewise.flower.identity import software

if TYPE_CHECKING:
    from sizewise.engines.device_runner import DeviceRunner
    from sizewise.exchange.view import Tensors
    from sizewise.flower.memory import Versions


def make_app() -> ClientApp:
    """Return the ClientApp of a sizewise node."""
    app, node = ClientApp(), Node()
    app.query("announce")(node.announce)
    app.train()(node.train)
    app.evaluate()(node.evaluate)
    return app


class Node:
    """Answers the server's messages."""

    def __init__(self) -> None:
        # The runner of the last run, for engines that keep the process: a cache, never a result.
        self._opened: tuple[object, DeviceRunner] | None = None

    def announce(self, message: Message, context: Context) -> Message:
        """Tell which device this is, and what it has."""
        order = wire.read(message.content, "order")
        try:
            said = wire.Announcement(
                device_of(context),
                budget_of(context),
                own_data="data" in context.node_config,
                software=software(str(order.get("model", "")), str(order.get("weights", ""))),
            )
        except SizewiseError as error:
            said = wire.Announcement(refusal=str(error))
        return Message(RecordDict({"announcement": wire.write(plain(said))}), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """Train what a plan says and send it back, with what it cost."""
        from sizewise.exchange.plan import Update
        from sizewise.flower.replies import digest

        order = wire.read(message.content, "order")
        asked = json.loads(order["plan"])
        report = wire.Report(asked["round"], asked["device"], digest(order["plan"]))
        tensors: Tensors = {}
        told: Tensors = {}
        try:
            parcel = wire.Parcel(message.content["tensors"])
            self._check(asked, parcel.size, context)
            runner, versions = self._runner(order, context), self._versions(order, context)
            known = versions.read(order["memory"]) if order["memory"] else {}
            received = parcel.tensors()
            del parcel, message.content["tensors"]  # A large model should not be here twice.
            outcome = runner.work(runner.read_plan(asked), received, known or {})
            if isinstance(outcome, Update):
                tensors, told, kept = outcome.tensors, outcome.sample_payload, outcome.device_state
                version = versions.write(kept, order["memory"]) if kept else ""
                facts = {name: getattr(outcome, name) for name in FACTS}
                report = replace(report, **facts, memory=version, forgot=known is None)
            else:
                report = replace(report, refusal=outcome.reason)
        except SizewiseError as error:
            report = replace(report, refusal=str(error))
        usage.give_back()  # Sending takes copies of the message, as much as training did.
        # Every record costs requests: what is empty is left out.
        parts = {"tensors": tensors, "sample_payload": told}
        packed = {name: wire.pack(part) for name, part in parts.items() if part}
        return Message(
            RecordDict({"report": wire.write(plain(report)), **packed}), reply_to=message
        )

    def evaluate(self, message: Message, context: Context) -> Message:
        """Score a model that only this device has."""
        from sizewise.exchange.state import State
        from sizewise.training import evaluation

        order = wire.read(message.content, "order")
        memory = self._versions(order, context).read(order["memory"])
        if memory is None:
            raise DataError("it no longer has the model that it trained")
        devices = {order["device"]: memory}
        state = State(
            wire.unpack(message.content["tensors"]), metadata=order["metadata"], devices=devices
        )
        score = evaluation.total(self._runner(order, context).evaluate(state, order["size"]))
        return Message(RecordDict({"score": wire.write(plain(score))}), reply_to=message)

    def _check(self, plan: dict[str, Any], message: int, context: Context) -> None:
        """Raise if a plan is for another device, or needs more bytes than this one has by now."""
        if plan["device"] != (device := device_of(context)):
            raise ConfigError(f"it is device {device}, and the plan is for device {plan['device']}")
        # Read anew: somebody else may have taken what was there when it joined.
        budget, needed = budget_of(context), plan.get("predicted")
        if budget is None or needed is None:
            return
        if needed > budget:
            raise ConfigError(
                f"its plan needs {needed:,} bytes, and it has no more than {budget:,} now"
            )
        if (needed := needed + usage.COPIES * message) > (here := usage.room()):
            raise ConfigError(
                f"its plan and its message need {needed:,} bytes, and it has no more than "
                f"{here:,} now"
            )

    def _runner(self, order: dict[str, Any], context: Context) -> "DeviceRunner":
        """Return where plans of a run are carried out, with this node's data."""
        import torch

        from sizewise import config as configs
        from sizewise.engines.device_runner import DeviceRunner
        from sizewise.flower import own_data
        from sizewise.runs import preparation

        torch.set_num_threads(1)  # This process trains, and does nothing else.
        folder = context.node_config.get("data")
        key = (json.dumps([order["config"], order["data"]]), folder)
        if self._opened is None or self._opened[0] != key:
            config, dataset = configs.from_dict(order["config"]), None
            if folder is not None:
                config, dataset = own_data.load(str(folder), config, order["data"])
            setting = preparation.prepare(config, dataset)
            runner = DeviceRunner(setting.method, setting.dataset, setting.partition)
            self._opened = (key, runner)
        return self._opened[1]

    def _versions(self, order: dict[str, Any], context: Context) -> "Versions":
        from sizewise.flower.memory import Versions

        home, folder = context.node_config.get("state-dir"), None
        if home is not None:
            # Runs of one config share what devices remember; others must not touch it.
            run = hashlib.sha256(json.dumps(order["config"]).encode()).hexdigest()[:16]
            folder = Path(str(home)).expanduser() / run / f"device-{device_of(context)}"
        return Versions(context.state, folder)


def device_of(context: Context) -> int:
    """Return the number of the device that a node is."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigError(
            f"a node's partition-id is the number of its device, counted from 0, not {number!r}; "
            f"start the SuperNode with --node-config 'partition-id=0'"
        )
    return number


def budget_of(context: Context) -> int | None:
    """Return a node's bytes, as its owner gave them; None if nothing was said.

    Raises:
        ConfigError: They are no bytes, or the machine does not have them.
    """
    given = context.node_config.get("memory")
    if given is None:
        return None
    here = usage.room()
    if given == "free" and here > 0:
        return here
    wanted = 1 if given == "free" else parse_bytes(given, "a node's memory")
    if wanted > here:
        raise ConfigError(
            f"a node with memory={given!r} needs {wanted + usage.RESERVE:,} bytes beside those of "
            f"the waiting process, and {max(0, here + usage.RESERVE):,} are left here; lower "
            f"memory, or give the machine or container {wanted - here:,} bytes more"
        )
    return wanted
