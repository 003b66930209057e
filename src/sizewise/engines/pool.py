"""The process pool: worker processes with one thread each, and no weights through pipes.

The server's tensors, the data and every worker's update live in shared arenas; pipes carry JSON
only. Workers are forked from one process that has imported everything, so a pool of any size starts
in the time of one import; or of none, where this process may be forked itself. Updates are given
out in the order of the plans, whoever finishes first, so the merged bits do not depend on the
number of workers.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sizewise.common.structure import plain
from sizewise.config import Config
from sizewise.data.dataset import Dataset
from sizewise.engines import Outcome
from sizewise.engines.packing import Accelerator, Needs
from sizewise.engines.shared_tensors import SharedTensors
from sizewise.engines.worker import BASE, base_in
from sizewise.engines.worker import main as become_workers
from sizewise.errors import EngineError
from sizewise.exchange.checkpoint import DeviceFiles
from sizewise.exchange.plan import Plan, Refusal, Update, portions
from sizewise.exchange.state import State
from sizewise.exchange.view import view_in_bytes
from sizewise.families.base import Method
from sizewise.torch_tools.placement import HOST
from sizewise.training import evaluation
from sizewise.training.evaluation import Score

log = logging.getLogger(__name__)

REORDER_WINDOW = 2
"""Portions per worker that may wait for an earlier, slower one."""

PORTION_BYTES = 1_000_000
"""Small updates travel several at a time, up to about so many bytes,"""

PORTIONS = 8
"""but a worker gets at least so many portions in a round, so that none waits long for another."""


@dataclass(frozen=True)
class _Worker:
    number: int
    connection: Connection
    inbox: SharedTensors
    outbox: SharedTensors

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            raise EngineError(_DIED) from None

    def receive(self) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise EngineError(_DIED) from None
        if "failure" in reply:
            raise EngineError(f"a worker failed; this is a bug:\n{reply['failure']}")
        return reply


_DIED = (
    "a worker process died: killed for lack of memory, or crashed in native code; try fewer "
    "engine.workers (1 shows a crash as it happens) and go on with `sizewise resume`"
)


_NO_ROOM = (
    "an accelerator is out of memory in an evaluation; lower recipe.eval_batch or "
    "engine.device_memory, and go on with `sizewise resume`"
)


def _may_fork() -> bool:
    """Return whether this process has a single thread, so that nothing is lost in a copy of it."""
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1


class _Forked:
    """A copy of this process that becomes a worker, and forks the others, as a process group."""

    def __init__(self, inherited: list[int], ours: list[Connection]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                for connection in ours:
                    # While somebody else holds it, nobody would notice that its owner is gone.
                    connection.close()
                become_workers(inherited)
            finally:
                os._exit(1)
        os.setpgid(self.pid, self.pid)

    def wait(self) -> None:
        """Wait for its end."""
        os.waitpid(self.pid, 0)


class PoolEngine:
    """Trains devices in worker processes.

    The constructor only starts the processes, so that they can import while the caller loads the
    data; `open` hands over the run.
    """

    validates = True

    def __init__(self, workers: int, devices: Sequence[torch.device] = (HOST,)) -> None:
        """Start processes, which take turns at the devices."""
        self._devices = devices
        self._needs: Needs | None = None
        self._state, self._data = SharedTensors(), SharedTensors()
        self._published: State | None = None
        self._together = 0
        pipes = [socket.socketpair() for _ in range(workers)]
        ours = [Connection(own.detach()) for own, _ in pipes]
        self._workers = [
            _Worker(number, own, SharedTensors(), SharedTensors())
            for number, own in enumerate(ours)
        ]
        inboxes = [worker.inbox for worker in self._workers]
        outboxes = [worker.outbox for worker in self._workers]
        self._arenas = [self._state, self._data, *inboxes, *outboxes]
        inherited = [arena.descriptor for arena in self._arenas]
        inherited += [theirs.fileno() for _, theirs in pipes]
        # A group of their own: Ctrl-C reaches this process only, which then ends them all.
        self._process: subprocess.Popen[bytes] | _Forked
        # An accelerator that this process has looked at is of no use to a copy of it.
        if HOST in devices and _may_fork():
            self._process = _Forked(inherited, ours)
        else:
            self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                # -P: a file in the current folder must not hide a module of the standard library.
                [sys.executable, "-P", "-m", "sizewise.engines.worker", *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        for _, theirs in pipes:
            theirs.close()

    def open(self, config: Config, method: Method, dataset: Dataset, partition: str) -> None:
        """Give the workers the run: its config, its data, and the file of its partition."""
        self._method, self._samples = method, len(dataset.test_labels)
        self._together = config.engine.together
        values = {field.name: getattr(dataset, field.name) for field in fields(dataset)}
        tensors = {name: value for name, value in values.items() if hasattr(value, "numel")}
        facts = {name: value for name, value in values.items() if name not in tensors}
        base = {f"{BASE}{name}": t for name, t in method.submodels.base_tensors().items()}
        layout = self._data.write({**tensors, **base})
        if base:  # This process, too, uses the one copy that all of them can see.
            method.submodels.hold(base_in(self._data.read(layout)))
        message = {
            "config": config.to_dict(),
            "budgets": method.task.budgets,
            "ratios": method.task.ratios,
            "devices": method.task.devices,
            "path": [entry for entry in sys.path if entry],
            "layout": layout,
            "dataset": facts,
            "partition": partition,
        }
        for worker in self._workers:
            worker.send({"open": {**message, "device": str(self._device_of(worker))}})
        self._needs = None
        if HOST not in self._devices:
            self._needs = Needs(config, method, self._devices[0])
            self._accelerators = self._measured(config.engine.device_memory)

    def _device_of(self, worker: _Worker) -> torch.device:
        return self._devices[worker.number % len(self._devices)]

    def _measured(self, size: int | None) -> dict[torch.device, Accelerator]:
        """Return the accelerators, of so many bytes each; default: what is free."""
        free: dict[torch.device, int] = {}
        for worker in self._workers if size is None else ():
            worker.send({"free": {}})
            # One after the other: each takes its share for being there.
            free[self._device_of(worker)] = worker.receive()["free"]
        return {device: Accelerator(device, size or free[device]) for device in free or self._used}

    @property
    def _used(self) -> list[torch.device]:
        return list(dict.fromkeys(map(self._device_of, self._workers)))

    def _tell(self, message: dict[str, Any]) -> None:
        for worker in self._workers:
            worker.send(message)

    def _publish(self, state: State) -> None:
        """Put a state where the workers can see it. Nobody may be at work."""
        if state is self._published:
            return
        self._published = state
        devices = state.devices.paths if isinstance(state.devices, DeviceFiles) else {}
        layout = self._state.write(state.tensors)
        metadata = dict(state.metadata)
        self._tell({"state": {"layout": layout, "metadata": metadata, "devices": devices}})

    def train(self, state: State, plans: Sequence[Plan]) -> Iterator[Outcome]:
        """Yield what each plan's device sent back, in the order of the plans."""
        self._publish(state)
        fair = -(-len(plans) // len(self._workers))
        usual = min(self._together, fair) or max(1, fair // PORTIONS)

        def most(plan: Plan) -> int:
            size = view_in_bytes(self._method.submodels.view(plan.submodel), state.tensors)
            return min(usual, PORTION_BYTES // max(size, 1))

        parts = portions(plans, most)
        needs = self._needs_of(parts)
        idle, busy = list(self._workers), dict[object, tuple[_Worker, int]]()
        waiting: dict[int, list[Outcome]] = {}
        pending, given = list(range(len(parts))), 0
        try:
            while given < len(parts):
                window = given + REORDER_WINDOW * len(self._workers)
                for worker in idle.copy():
                    number = self._next(worker, pending, window, needs)
                    if number is not None:
                        self._hand_out(worker, parts[number], state)
                        busy[worker.connection] = (worker, number)
                        pending.remove(number)
                        idle.remove(worker)
                if given in waiting:
                    yield from waiting.pop(given)
                    given += 1
                    continue
                for connection in wait([worker.connection for worker, _ in busy.values()]):
                    worker, number = busy.pop(connection)
                    outcomes = self._received(worker, parts[number])
                    if outcomes is None:
                        pending.insert(0, number)
                    else:
                        waiting[number] = outcomes
                    idle.append(worker)
        finally:
            # After an interrupt, answers must not be taken for those to later questions.
            for worker, number in busy.values():
                self._received(worker, parts[number])

    def _needs_of(self, parts: Sequence[Sequence[Plan]]) -> list[int]:
        """Return the bytes that portions of plans need on an accelerator; none in host memory."""
        if self._needs is None:
            return []
        size = min(accelerator.size for accelerator in self._accelerators.values())
        found = [self._needs.training(part, size) for part in parts]
        torch.accelerator.empty_cache()  # Kernels were asked what they take, on this very device.
        return found

    def _next(
        self, worker: _Worker, pending: Sequence[int], window: int, needs: Sequence[int]
    ) -> int | None:
        """Return the next portion for a worker: the first that fits; keep its bytes for it."""
        if not needs:
            return pending[0] if pending and pending[0] < window else None
        accelerator = self._accelerators[self._device_of(worker)]
        for number in pending:
            if number < window and accelerator.fits(needs[number]):
                accelerator.promise(worker.number, needs[number])
                return number
        return None

    def _received(self, worker: _Worker, plans: Sequence[Plan]) -> list[Outcome] | None:
        """Return what a worker's devices sent back; None if it ran out of memory."""
        reply = worker.receive()
        if self._needs is not None:
            accelerator = self._accelerators[self._device_of(worker)]
            if "out_of_memory" in reply:
                accelerator.ran_out(worker.number)
            accelerator.done(worker.number)
        return None if "out_of_memory" in reply else _outcomes(worker, plans, reply)

    def _hand_out(self, worker: _Worker, plans: Sequence[Plan], state: State) -> None:
        payloads = {
            f"{number}/{name}": tensor
            for number, plan in enumerate(plans)
            for name, tensor in self._method.payload(state, plan).items()
        }
        message = {"plan": plain(plans[0]), "devices": [plan.device for plan in plans]}
        worker.send({"train": {**message, "payloads": worker.inbox.write(payloads)}})

    def evaluate(self, state: State) -> dict[str, Score]:
        """Score every deployed model on the test set, its batches shared among the workers."""
        return self._evaluate(state, dict.fromkeys(self._method.deploy(state)))

    def validate(self, state: State, rows: Mapping[str, Tensor]) -> dict[str, Score]:
        """Score deployed models, each on some training samples, given by their numbers."""
        return self._evaluate(state, rows)

    def _evaluate(self, state: State, rows: Mapping[str, Tensor | None]) -> dict[str, Score]:
        """Score models on some rows each, or on the test set, batches shared among the workers."""
        self._publish(state)
        return {
            size: evaluation.total(self._scores(size, own, self._evaluators(state, size)))
            for size, own in rows.items()
        }

    def _scores(self, size: str, rows: Tensor | None, chosen: Sequence[_Worker]) -> list[Score]:
        """Return the scores of a model on some rows, or the test set, from workers that share."""
        samples = self._samples if rows is None else len(rows)
        count = evaluation.batch_count(samples, self._method.task.recipe.eval_batch)
        for place, worker in enumerate(chosen):
            share = range(count * place // len(chosen), count * (place + 1) // len(chosen))
            layout = worker.inbox.write({} if rows is None else {"rows": rows})
            content = {"size": size, "batches": list(share), "layout": layout}
            worker.send({"evaluate": content})
        replies = [worker.receive() for worker in chosen]
        if not any("out_of_memory" in reply for reply in replies):
            return [Score(**score) for reply in replies for score in reply["scores"]]
        if len(chosen) == 1:
            raise EngineError(_NO_ROOM)
        fewer = chosen[: len(chosen) // 2]
        log.warning("out of memory: %d workers evaluate, not %d", len(fewer), len(chosen))
        return self._scores(size, rows, fewer)

    def _evaluators(self, state: State, size: str) -> list[_Worker]:
        """Return the workers that have room to evaluate a model at the same time."""
        if self._needs is None:
            return self._workers
        chosen: list[_Worker] = []
        for device, accelerator in self._accelerators.items():
            need = self._needs.evaluation(state, size, accelerator.size)
            here = [worker for worker in self._workers if self._device_of(worker) == device]
            chosen += here[: max(1, accelerator.room // max(need, 1))]
        torch.accelerator.empty_cache()
        return chosen

    def close(self) -> None:
        """End the workers at once, whatever they are doing: nothing of theirs is lost."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for worker in self._workers:
            worker.connection.close()
        for arena in self._arenas:
            arena.close()


def _outcomes(worker: _Worker, plans: Sequence[Plan], reply: dict[str, Any]) -> list[Outcome]:
    kinds = ("tensors", "device_state", "sample_payload")
    parts: list[dict[str, dict[str, Tensor]]] = [{kind: {} for kind in kinds} for _ in plans]
    for path, tensor in worker.outbox.read(reply["layout"]).items():
        number, kind, name = path.split("/", 2)
        # Copies, so that the worker can go on while an update waits for its turn.
        parts[int(number)][kind][name] = tensor.clone()
    return [
        Refusal(**fact["refusal"]) if "refusal" in fact else Update(plan, **part, **fact)  # type: ignore[arg-type]
        for plan, part, fact in zip(plans, parts, reply["facts"], strict=True)
    ]
