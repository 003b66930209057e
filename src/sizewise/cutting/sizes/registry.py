"""The registry of layers that store sizes: one rule a class."""

from functools import singledispatch

from torch import nn


@singledispatch
def resize(narrow: nn.Module, full: nn.Module) -> None:
    """Update what a module stores about its sizes, after its tensors were cut.

    Modules that read sizes off their tensors need nothing. Teach it others with
    `@resize.register(MyLayer)`; modules inside a module come after it. Factors such as the scale
    of attention are no sizes and stay as they are stored.

    Args:
        narrow: A copy of `full` that holds the cut tensors; changed in place.
        full: The module in the full model.
    """
