"""The precision of a training step's forward pass; parameters and optimisers stay in float32.

With bf16 and fp16, torch's autocast chooses which operations run in 16 bits. The small gradients of
fp16 are scaled up on the way, and a step whose gradients are not finite is left out. tf32 is what
NVIDIA's tensor cores make of float32.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sizewise.errors import ConfigError

Precision = Literal["float32", "bf16", "fp16", "tf32"]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

FIRST_SCALE = 2.0**10
"""Scale of fp16's first gradients. Torch begins with 2^16, which loses the first steps of each
device, and some devices take only a few."""


def check(precision: Precision, device: torch.device) -> None:
    """Raise ConfigError unless a device can compute in a precision."""
    if precision == "tf32" and device.type != "cuda":
        raise ConfigError(
            f"recipe.precision = 'tf32' is for CUDA devices, and engine.device is {str(device)!r}; "
            f"use 'bf16' or 'float32'"
        )


def computed_in(precision: Precision, loss: Any) -> Any:
    """Return a loss whose operations run in a precision, also where it yields several terms."""
    if precision not in _TYPES:
        return loss

    def cast(module: nn.Module, inputs: Any, targets: Any) -> Tensor | Iterable[Tensor]:
        device = next(module.parameters()).device.type
        with _autocast(device, precision):
            value = loss(module, inputs, targets)
        return value if isinstance(value, Tensor) else _each(iter(value), device, precision)

    return cast


def _each(terms: Iterator[Tensor], device: str, precision: Precision) -> Iterator[Tensor]:
    """Yield terms, each computed in a precision; what happens between them is not."""
    while True:
        with _autocast(device, precision):
            term = next(terms, None)
        if term is None:
            return
        yield term
        del term  # It would stay alive while the next one is computed.


def _autocast(device: str, precision: Precision) -> AbstractContextManager[Any]:
    return torch.autocast(device, _TYPES[precision])


@contextmanager
def _tensor_cores() -> Iterator[None]:
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "tf32"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def around(precision: Precision) -> AbstractContextManager[None]:
    """Return what a whole step is run in."""
    return _tensor_cores() if precision == "tf32" else nullcontext()


def scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return what scales the gradients of the steps of a stage; None if they need none."""
    if precision != "fp16":
        return None
    made = torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE)
    made.scale(torch.zeros((), device=device))  # Its own few bytes are there before the first step.
    return made
