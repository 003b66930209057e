"""What this machine can do: each of its devices is tried with a tiny run.

    sizewise doctor

It trains the same few steps everywhere, twice, and compares the bytes that were predicted with
those that the device's allocator handed out.
"""

import copy
import gc
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sizewise import config as configs
from sizewise import models
from sizewise.common.structure import format_bytes
from sizewise.memory.prediction import Meter, predict
from sizewise.runs import session
from sizewise.steps.optimizers import Sgd
from sizewise.steps.step import training_step
from sizewise.torch_tools.placement import HOST, moved, placed

TINY: dict[str, Any] = {
    "rounds": 1,
    "model": {"name": "cnn", "args": {"layers": [8, 16]}},
    "data": {"train_limit": 128, "test_limit": 64},
    "fleet": {"devices": 4, "per_round": 4},
    "recipe": {"batch": 16, "eval_batch": 64},
}
IMAGE, BATCH = (3, 16, 16), 16


@dataclass(frozen=True)
class Finding:
    """What was found out about a device.

    Attributes:
        device: Its name, as `engine.device` takes it.
        kind: What it is.
        free: Bytes that are free, if it says so.
        total: Bytes that it has, if it says so.
        predicted: Bytes of a training step, predicted for it.
        allocated: The most that its allocator handed out for that step; on the CPU, what was live.
        repeats: Whether two tiny runs ended with the same bits.
        as_cpu: Whether they ended with those of the CPU.
        not_deterministic: What it has no deterministic kernel for, in torch's words.
        trouble: Why it cannot be used.
    """

    device: str
    kind: str
    free: int | None = None
    total: int | None = None
    predicted: int | None = None
    allocated: int | None = None
    repeats: bool | None = None
    as_cpu: bool | None = None
    not_deterministic: str | None = None
    trouble: str | None = None

    def __str__(self) -> str:
        if self.trouble is not None:
            return f"{self.device} ({self.kind}): cannot be used: {self.trouble}"
        memory = ""
        if self.free is not None and self.total is not None:
            memory = f"{format_bytes(self.free)} of {format_bytes(self.total)} free; "
        more = ", more than predicted" if (self.allocated or 0) > (self.predicted or 0) else ""
        bits = "repeats its bits" if self.repeats else "does not repeat its bits"
        whose = "those of the CPU" if self.as_cpu else "which are not those of the CPU"
        kernels = self.not_deterministic or "all kernels of the step are deterministic"
        return (
            f"{self.device} ({self.kind}): {memory}a step predicted to take {self.predicted:,} "
            f"bytes took {self.allocated:,}{more}; a tiny run {bits}, {whose}; {kernels}"
        )


def devices() -> list[torch.device]:
    """Return the devices of this machine, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    kind = "" if accelerator is None else accelerator.type
    return [HOST, *(torch.device(kind, number) for number in range(count))]


def examine() -> Iterator[Finding]:
    """Yield what is found out about each device, as soon as it is."""
    expected = None
    for device in devices():
        try:
            first, second = (_tiny_run(device) for _ in range(2))
            expected = expected or first
            yield Finding(
                str(device),
                _kind(device),
                *_memory(device),
                *_bytes(device),
                repeats=first == second,
                as_cpu=first == expected,
                not_deterministic=_not_deterministic(device),
            )
        except Exception as error:  # A driver may fail in any way; the others should be tried too.
            yield Finding(str(device), _kind(device), trouble=f"{type(error).__name__}: {error}")


def _tiny_run(device: torch.device) -> str:
    config = configs.from_dict({**TINY, "engine": {"device": str(device)}})
    with (
        tempfile.TemporaryDirectory() as folder,
        session.started(config, Path(folder) / "run") as federation,
    ):
        return str(federation.run()["state_sha256"])


def _kind(device: torch.device) -> str:
    if device == HOST:
        return platform.processor() or platform.machine()
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return str(name(device)) if name is not None else "an accelerator"


def _memory(device: torch.device) -> tuple[int | None, int | None]:
    """Return the bytes that are free, and all; None if it does not say."""
    if device == HOST:
        return None, None
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None, None
    return int(free), int(total)


def _step(device: torch.device) -> tuple[nn.Module, partial[Any]]:
    """Return a model on a device, and a step of it."""
    torch.manual_seed(0)
    built = models.build("preresnet8", classes=10, image=IMAGE)
    # A copy also on the CPU: the model that is predicted must not be the one that learns.
    module = copy.deepcopy(built) if device == HOST else placed(built, device)
    batch = torch.randn(BATCH, *IMAGE), torch.zeros(BATCH, dtype=torch.int64)
    optimizer = Sgd(list(module.parameters()), momentum=0.9)
    return built, partial(training_step, module.train(), optimizer, *moved(batch, device))


def _bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a step, as predicted and as they were taken."""
    gc.collect()  # What earlier runs left behind must not be given back meanwhile.
    before = 0 if device == HOST else torch.accelerator.memory_allocated(device)
    built, step = _step(device)
    sgd = partial(Sgd, momentum=0.9)
    inputs = torch.empty((BATCH, *IMAGE), device="meta")
    step()  # The first one makes the optimiser's state.
    if device == HOST:
        with Meter() as meter:
            meter.track(*step.args)
            step()
        taken = meter.peak
    else:
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        taken = torch.accelerator.max_memory_allocated(device) - before
    predicted = predict(built, inputs, optimizer=sgd, device=device).peak
    return predicted, taken


def _not_deterministic(device: torch.device) -> str | None:
    """Return torch's first complaint if a step must be deterministic; None if it has none."""
    try:
        with _deterministic():
            _step(device)[1]()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
