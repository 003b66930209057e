"""What went wrong in somebody's model, as one sentence that names the layer if it can."""

import traceback
from collections.abc import Iterator

from torch import nn


def blame(error: Exception, *modules: nn.Module) -> str:
    """Return the reason of an error, after the innermost layer that was at work when it came.

    Args:
        error: What was caught.
        modules: The model, and its copies.
    """
    reason = str(error).strip().partition("\n")[0].strip()
    if " " not in reason:  # The name of a key, or nothing at all.
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    names = {id(layer): name for module in modules for name, layer in _layers(module)}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # A method's first argument, by whatever name; and what a loop over layers was at.
        for variable in (*frame.f_code.co_varnames[:1], "layer"):
            owner = frame.f_locals.get(variable)
            if names.get(id(owner)):
                found = f"layer {names[id(owner)]!r}, a {type(owner).__name__}: "
    return f"{found}{reason}"


def _layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    # `named_modules` would put them into a set, which not every module allows.
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _layers(child, f"{path}.{name}" if path else name)
