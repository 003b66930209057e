"""The check of a narrow model: every operation gives a result of the shape that it must have.

It runs without data, so it is cheap, and it sees what could go wrong in silence: a forward that
uses a number of channels that it stored often runs on fewer of them, with other heads or groups.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from sizewise.cutting.groups import Channels
from sizewise.cutting.tracer import Step
from sizewise.cutting.union_find import Mask
from sizewise.errors import ModelError
from sizewise.torch_tools.dry_run import Recorder, Seen, named_tensors, on_meta, run
from sizewise.torch_tools.failures import OTHERWISE, Paths, told

_ADVICE = (
    "its forward may use a number of channels that it stored: read it off a tensor, update it with "
    f"sizewise.cutting.resize, {OTHERWISE}"
)


class Misfit(ModelError):
    """A narrow copy does not run, or does other things than it should.

    Attributes:
        module: Path of the module in which that shows.
        training: In which mode.
        step: Number of the first result that is wrong, or the last before one that is missing.
    """

    def __init__(self, message: str, module: str, training: bool, step: int) -> None:
        super().__init__(message)
        self.module, self.training, self.step = module, training, step


def check(small: nn.Module, channels: Channels, mask: Mask) -> None:
    """Raise Misfit unless every operation gives the shape that its channels predict.

    The narrow model is left as it was; `channels` is what `trace` found in the full one.
    """
    double = on_meta(small, trial=True)
    paths = Paths(double)
    kind = next((t.dtype for _, t in named_tensors(small) if t.is_floating_point()), torch.float)
    inputs = [x.to(kind) if x.is_floating_point() else x for x in channels.inputs]
    for training, steps in channels.passes.items():
        recorder = Recorder(paths)
        what = f"{type(small).__name__} cannot run when it is cut"
        try:
            with told(paths, what, _ADVICE), recorder:
                run(double.train(training), *inputs)
        except ModelError as error:
            cause = error.__cause__
            where = paths.failed(cause) if cause else ""
            fits = [_fits(got, step, mask) for got, step in zip(recorder.seen, steps, strict=False)]
            wrong = fits.index(False) if False in fits else len(fits) - 1
            raise Misfit(str(error), where, training, wrong) from cause
        _compare(type(small).__name__, recorder.seen, steps, mask, training)


def _compare(
    name: str, got: Sequence[Seen], steps: Sequence[Step], mask: Mask, training: bool
) -> None:
    for number, ((operation, module, shape), step) in enumerate(zip(got, steps, strict=False)):
        if not _fits(got[number], step, mask):
            raise Misfit(
                f"{name} goes another way when it is cut: expected {step.operation} of shape "
                f"{step.cut_shape(mask)} in {step.module or 'it'}, got {operation} of shape "
                f"{shape}; {_ADVICE}",
                module if operation != step.operation else step.module,
                training,
                number,
            )
    if len(got) != len(steps):
        places = [module for _, module, _ in got], [step.module for step in steps]
        place = max(places, key=len)[min(len(got), len(steps))]
        raise Misfit(
            f"{name} runs {len(got)} operations when it is cut instead of {len(steps)}, from "
            f"{place or 'its forward'} on; {_ADVICE}",
            place,
            training,
            min(len(got), len(steps)),
        )


def _fits(got: Seen, step: Step, mask: Mask) -> bool:
    operation, _, shape = got
    return operation == step.operation and _rows(shape) == _rows(step.cut_shape(mask))


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    # Leading dimensions may or may not be flattened for a product.
    return (math.prod(shape[:-1]), *shape[-1:])
