"""The worker process: `python -m sizewise.engines.worker STATE DATA INBOX... OUTBOX... PIPE...`.

The arguments are inherited descriptors. This process imports what training needs, forks once for
each further worker, and then each of them answers messages until its pipe closes.
"""

import gc
import json
import os
import select
import sys
import threading
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from sizewise import config as configs
from sizewise.common.heap import keep_freed
from sizewise.common.structure import plain
from sizewise.data.dataset import Dataset
from sizewise.data.partitions import load_partition
from sizewise.engines import FACTS
from sizewise.engines.device_runner import DeviceRunner
from sizewise.engines.shared_tensors import SharedTensors
from sizewise.exchange.checkpoint import DeviceFiles
from sizewise.exchange.plan import Refusal
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors

Message = dict[str, Any]

BASE = "base/"
"""What the names of frozen weights begin with, among the data that all processes see."""


def base_in(tensors: Tensors) -> Tensors:
    """Return the frozen weights among what all processes see, by their own names."""
    return {n.removeprefix(BASE): t for n, t in tensors.items() if n.startswith(BASE)}


class Worker:
    """Answers the pool's messages: `open` first, then a `state` before each kind of work."""

    def __init__(
        self, state: SharedTensors, data: SharedTensors, inbox: SharedTensors, outbox: SharedTensors
    ) -> None:
        self._state_tensors, self._data_tensors = state, data
        self._inbox, self._outbox = inbox, outbox
        self._state = State({})
        self._runner: DeviceRunner

    def answer(self, message: Message) -> Message | None:
        """Do what a message asks for; None when no reply is expected."""
        ((kind, content),) = message.items()
        if kind in ("train", "evaluate"):
            try:
                return self._train(content) if kind == "train" else self._evaluate(content)
            except torch.OutOfMemoryError:
                pass  # Not here: what ran out would stay alive with the error.
            gc.collect()
            self._runner.rest()
            return {"out_of_memory": True}
        if kind == "free":
            return {"free": self._runner.free_memory()}
        if kind == "open":
            self._open(content)
        else:
            self._see(content)
        return None

    def _open(self, content: Message) -> None:
        # A user's own model or method must be importable here as it was in the main process.
        sys.path.extend(entry for entry in content["path"] if entry not in sys.path)
        given = self._data_tensors.read(content["layout"])
        parts: Message = {name: t for name, t in given.items() if not name.startswith(BASE)}
        for name, value in content["dataset"].items():
            parts[name] = tuple(value) if isinstance(value, list) else value
        dataset = Dataset(**parts)
        config = configs.from_dict(content["config"])
        task = replace(
            configs.make_task(config, dataset),
            budgets=tuple(content["budgets"]),
            ratios=tuple(content["ratios"]),
            devices=content["devices"],
            device=content["device"],
        )
        method = configs.make_method(config, task)
        if base := base_in(given):
            method.submodels.hold(base)
        partition = load_partition(content["partition"])
        self._runner = DeviceRunner(method, dataset, partition, config.engine.together)

    def _see(self, content: Message) -> None:
        tensors = self._state_tensors.read(content["layout"])
        devices = DeviceFiles({int(k): path for k, path in content["devices"].items()})
        self._state = State(tensors, metadata=content["metadata"], devices=devices)

    def _train(self, content: Message) -> Message:
        plan = self._runner.read_plan(content["plan"])
        payloads: list[dict[str, Tensor]] = [{} for _ in content["devices"]]
        for path, tensor in self._inbox.read(content["payloads"]).items():
            place, _, name = path.partition("/")
            payloads[int(place)][name] = tensor
        facts: list[Message] = []
        tensors: dict[str, Tensor] = {}
        plans = [replace(plan, device=device) for device in content["devices"]]
        for number, outcome in enumerate(self._runner.train_all(self._state, plans, payloads)):
            if isinstance(outcome, Refusal):
                facts.append({"refusal": plain(outcome)})
                continue
            facts.append({name: getattr(outcome, name) for name in FACTS})
            # Three kinds of tensors in one arena, told apart by their place in the layout.
            for kind in ("tensors", "device_state", "sample_payload"):
                for name, tensor in getattr(outcome, kind).items():
                    tensors[f"{number}/{kind}/{name}"] = tensor
        self._runner.rest()
        return {"layout": self._outbox.write(tensors), "facts": facts}

    def _evaluate(self, content: Message) -> Message:
        rows = self._inbox.read(content["layout"]).get("rows")
        scores = self._runner.evaluate(self._state, content["size"], content["batches"], rows)
        self._runner.rest()
        return {"scores": plain(scores)}


def serve(worker: Worker, connection: Connection) -> None:
    """Answer messages until the pool hangs up."""
    threading.Thread(target=_end_with_pool, args=(connection.fileno(),), daemon=True).start()
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply = worker.answer(message)
        except Exception:
            reply = {"failure": traceback.format_exc()}
        if reply is not None:
            connection.send_bytes(json.dumps(reply).encode())


def _end_with_pool(pipe: int) -> None:
    """End this process when the other end of its pipe closes, also in the middle of training."""
    poll = select.poll()
    poll.register(pipe, 0)  # Hang-ups are always reported.
    poll.poll()
    os._exit(0)


def main(descriptors: list[int]) -> None:
    """Become one worker, and fork the others."""
    count = (len(descriptors) - 2) // 3
    state, data = SharedTensors(descriptors[0]), SharedTensors(descriptors[1])
    inboxes, outboxes, pipes = (descriptors[2 + i * count :][:count] for i in range(3))
    torch.set_num_threads(1)
    keep_freed()
    number = 0
    for other in range(1, count):
        if os.fork() == 0:
            number = other
            break
    for other, pipe in enumerate(pipes):
        # A pipe must be open in one worker only, or its end would not be noticed.
        if other != number:
            os.close(pipe)
    boxes = SharedTensors(inboxes[number]), SharedTensors(outboxes[number])
    serve(Worker(state, data, *boxes), Connection(pipes[number]))
    os._exit(0)  # A forked child must not run its parent's exit handlers.


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
