"""The check of a narrow model: every operation gives a result of the shape that it must have.

It runs without data, so it is cheap, and it sees what could go wrong in silence: a forward that
uses a number of channels that it stored often runs on fewer of them, with other heads or groups.
"""

import math
from typing import Any

import torch
from torch import nn

from sizewise.channels import Channels, Mask, Step
from sizewise.dispatch import DispatchMode
from sizewise.dry_run import computed, named_tensors, on_meta, run, tensors_in
from sizewise.errors import ModelError
from sizewise.failures import OTHERWISE, Paths, told

_ADVICE = (
    "its forward may use a number of channels that it stored: read it off a tensor, update it with "
    f"sizewise.cutting.resize, {OTHERWISE}"
)


def check(small: nn.Module, channels: Channels, mask: Mask) -> None:
    """Raise ModelError unless every operation gives the shape that its channels predict.

    Args:
        small: The narrow model; it is left as it was.
        channels: What `trace` found in the full model.
        mask: Which channels are kept.
    """
    double = on_meta(small)
    paths = Paths(double)
    kind = next((t.dtype for _, t in named_tensors(small) if t.is_floating_point()), torch.float)
    inputs = [x.to(kind) if x.is_floating_point() else x for x in channels.inputs]
    for training, steps in channels.passes.items():
        recorder = _Recorder(paths)
        with told(paths, f"{type(small).__name__} cannot run when it is cut", _ADVICE), recorder:
            run(double.train(training), *inputs)
        _compare(type(small).__name__, recorder.steps, steps, mask)


class _Recorder(DispatchMode):
    """Notes the shapes of all results that are computed, and where."""

    def __init__(self, paths: Paths) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._paths = paths

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        found = tensors_in(out)
        if found and found[0].is_floating_point():
            shape = tuple(found[0].shape)
            self.steps += [Step(kind, self._paths.current, shape, {}) for kind in computed(func)]
        return out


def _compare(name: str, got: list[Step], steps: tuple[Step, ...], mask: Mask) -> None:
    for ours, step in zip(got, steps, strict=False):
        expected = step.cut_shape(mask)
        if ours.operation != step.operation or _rows(ours.shape) != _rows(expected):
            raise ModelError(
                f"{name} goes another way when it is cut: expected {step.operation} of shape "
                f"{expected} in {step.module or 'it'}, got {ours.operation} of shape "
                f"{ours.shape}; {_ADVICE}"
            )
    if len(got) != len(steps):
        place = max(got, steps, key=len)[min(len(got), len(steps))].module
        raise ModelError(
            f"{name} runs {len(got)} operations when it is cut instead of {len(steps)}, from "
            f"{place or 'its forward'} on; {_ADVICE}"
        )


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    # Leading dimensions may or may not be flattened for a product.
    return (math.prod(shape[:-1]), *shape[-1:])
