"""Step sizes: a number for each residual branch, which may learn.

A residual block is a step of a solver, x + s F(x), with s = 1. A model that lacks some blocks can
take longer steps instead (NeFL). Blocks mark where a branch joins its stream with `Branch`, which
does nothing until a step size takes its place; in a block without such a mark, s multiplies all
that the block changes.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sizewise.errors import ModelError
from sizewise.surgery.anatomy import Anatomy
from sizewise.surgery.in_place import Form, InPlace

NAME = "step_size"
"""What the step size of a block without a mark is called."""


class Branch(nn.Identity):
    """The end of a residual branch: a place for a step size."""


class StepSize(nn.Module):
    """Multiplies a residual branch by a number.

    Attributes:
        size: The number, of shape (); a parameter if it learns.
    """

    size: Tensor

    def __init__(self, start: float, learns: bool) -> None:
        super().__init__()
        if learns:
            self.size = nn.Parameter(torch.tensor(start))
        else:
            self.register_buffer("size", torch.tensor(start), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return self.size * x


def add_step_sizes(
    model: nn.Module, parts: Anatomy, kept: Sequence[int], *, absorb: bool, learns: bool
) -> nn.Module:
    """Give the blocks of a model that were not dropped, ascending, step sizes; changes it in place.

    They start at 1; or, where they `absorb`, the last block before a gap starts at 1 plus the
    number of blocks that are missing after it. They are parameters if they are to learn.
    """
    seen: set[nn.Module] = set()
    for number, after in pairwise((*kept, len(parts.blocks))):
        block = model.get_submodule(parts.blocks[number])
        if block in seen:
            continue  # One block may stand in several places.
        seen.add(block)
        start = float(after - number) if absorb else 1.0
        branches = [name for name, part in block.named_modules() if isinstance(part, Branch)]
        for name in branches:
            block.set_submodule(name, StepSize(start, learns))
        if not branches:
            if hasattr(block, NAME):
                raise ModelError(
                    f"{parts.blocks[number]!r} already has something called {NAME!r}, where its "
                    "step size would go; rename that"
                )
            block.add_module(NAME, StepSize(start, learns))
            form = parts.forms[number] if isinstance(parts, InPlace) else None
            block.register_forward_hook(partial(_longer_step, form=form), with_kwargs=True)
    return model


def _longer_step(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, form: Form | None
) -> Any:
    """Return x + s (block(x) - x); where the shape changes there is no stream to add to.

    The form says where the hidden tensor is; without one, it is all that comes and goes.
    """
    x = args[0] if form is None else form.hidden_in(args, kwargs)
    y, step = output if form is None else form.hidden_out(output), block.get_submodule(NAME)
    changed: Tensor = step(y - x) + x if x.shape == y.shape else step(y)
    return changed if form is None else form.with_hidden(output, changed)
