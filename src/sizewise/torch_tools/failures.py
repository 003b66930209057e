"""Where and why somebody else's module failed, in one sentence that names the layer."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
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
_TORCH = str(Path(torch.__file__).parent)
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
    if " " in text and isinstance(error, _PLAIN):  # Else it is the name of a key, or no sentence.
        return text
    name = type(error).__name__
    if text:
        return f"{name}: {text}"
    # The innermost line of somebody else's: torch's own assertions say nothing.
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if not frame.filename.startswith(_TORCH)]
    return f"{name} at {lines[-1]!r}" if lines and lines[-1] else name


def blame(error: Exception, *modules: nn.Module) -> str:
    """Return the reason of an error, after the innermost layer that was at work when it came.

    Unlike `Paths` it needs no hooks, so it also serves where a layer fails outside its forward.
    The modules are the model and its copies.
    """
    names = {id(layer): name for module in modules for name, layer in _layers(module)}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # A method's first argument, by whatever name; and what a loop over layers was at.
        for variable in (*frame.f_code.co_varnames[:1], "layer"):
            owner = frame.f_locals.get(variable)
            if names.get(id(owner)):
                found = f"layer {names[id(owner)]!r}, a {type(owner).__name__}: "
    return f"{found}{reason(error)}"


def _layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    # `named_modules` would put them into a set, which not every module allows.
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _layers(child, f"{path}.{name}" if path else name)


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
