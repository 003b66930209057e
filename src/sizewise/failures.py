"""Where and why somebody else's forward failed: an error that names the module."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from sizewise.errors import ModelError, SizewiseError

OTHERWISE = "or choose a method that does not cut by width, such as fedavg or fedepth"
VALUES = (
    "it looks at numbers that it computed, which a run without data does not have: decide by "
    f"shapes or with torch.where, {OTHERWISE}"
)
OUTSIDE = (
    "it uses a tensor that is not among its parameters, buffers and attributes: make it one of "
    f"them, {OTHERWISE}"
)
_PLAIN = (RuntimeError, ValueError, TypeError, AssertionError)


class Paths:
    """Knows which module of a model is running; the hooks that tell stay with the model."""

    def __init__(self, model: nn.Module) -> None:
        self._stack: list[str] = []
        self._failure: tuple[BaseException | None, str] = (None, "")
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(path), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    @property
    def current(self) -> str:
        """Path of the module whose forward is running, "" for the model itself."""
        return self._stack[-1] if self._stack else ""

    def failed(self, error: BaseException) -> str:
        """Return the path of the innermost module that an error came out of."""
        return self._failure[1] if self._failure[0] is error else ""

    def _enter(self, path: str) -> Callable[..., None]:
        return lambda *_: self._stack.append(path)

    def _leave(self, *_: object) -> None:
        path, error = self._stack.pop(), sys.exc_info()[1]
        if error is not None and error is not self._failure[0]:
            self._failure = error, path


def reason(error: BaseException) -> str:
    """Return what an error says, in one line that is never empty."""
    text = str(error).strip().partition("\n")[0]
    if text and isinstance(error, _PLAIN):
        return text
    name = type(error).__name__
    if text:
        return f"{name}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{name} at {frames[-1].line!r}" if frames and frames[-1].line else name


@contextmanager
def told(paths: Paths, what: str, advice: str) -> Iterator[None]:
    """Turn whatever a forward raises into a ModelError that names the module.

    Args:
        paths: Of the model that runs.
        what: What it cannot do, such as "CNN cannot be traced".
        advice: What to do about it, unless the reason asks for something else.
    """
    try:
        yield
    except SizewiseError:
        raise
    except Exception as error:
        where, why = paths.failed(error) or "the model", reason(error)
        if "expected device meta" in why:
            advice = OUTSIDE
        elif "meta tensor" in why:
            advice = VALUES
        raise ModelError(f"{what}: {why} (in {where}); {advice}") from error
