"""Models without some of their blocks: a dropped block is not run, and not held either.

What stays of it is its shortcut: nothing at all where a block keeps the shape of its input; where
it does not, what its own method `dropped` returns, such as the projection of a ResNet's stage.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import nn

from sizewise.errors import ModelError
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.in_place import InPlace, Passed


def drop_blocks(
    model: nn.Module, parts: Anatomy, shapes: Sequence[torch.Size], kept: Collection[int]
) -> nn.Module:
    """Take blocks out of a model; changes it in place. Tensors that stay keep their names.

    Only blocks with the numbers kept stay; the shapes are what `hidden_shapes` gives, at any width.

    Raises:
        ModelError: A block changes the shape and does not say what is left without it.
    """
    for number, path in enumerate(parts.blocks):
        if number in kept:
            continue
        block = model.get_submodule(path)
        if isinstance(parts, InPlace) and parts.forms[number].keeps_shape:
            model.set_submodule(path, Passed(parts.forms[number].unfitted, block))
            continue
        dropped = None if isinstance(parts, InPlace) else getattr(block, "dropped", None)
        if not callable(dropped) and shapes[number] != shapes[number + 1]:
            raise ModelError(
                f"the block {path!r} changes the shape of its input, so it cannot be left out; "
                f"keep it in all submodels, or give {type(block).__name__} a method `dropped` that "
                "returns its shortcut as a module"
            )
        model.set_submodule(path, dropped() if callable(dropped) else nn.Identity())
    return model


def stages(shapes: Sequence[torch.Size]) -> list[range]:
    """Return the blocks between changes of shape; a block that changes it begins the next stage.

    The shapes are what `hidden_shapes` gives.
    """
    last = len(shapes) - 1
    starts = [n for n in range(last) if n == 0 or shapes[n] != shapes[n + 1]]
    return [range(a, b) for a, b in pairwise((*starts, last))]
