"""NeFL's submodels: the full model, cut to some of its channels, without some of its blocks."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

from torch import nn

from sizewise.cutting import selection, shrinking
from sizewise.cutting.channels import Channels, Kept
from sizewise.exchange.plan import Submodel
from sizewise.exchange.view import TensorSlice, View
from sizewise.families.submodels import Submodels
from sizewise.methods.nefl.scaling import Scaled
from sizewise.surgery import norms
from sizewise.surgery.dropping import drop_blocks
from sizewise.surgery.step_sizes import StepSize, add_step_sizes
from sizewise.torch_tools.dry_run import on_meta
from sizewise.training.loop import own_tensors
from sizewise.training.task import Task

KINDS = {"norms": norms.LAYERS, "steps": (StepSize,)}
"""What words of `method.apart` stand for; others are patterns of names."""


class ScaledSubmodels(Submodels):
    """Submodels in width and depth; `NeFL.Options` says what steps and tensors apart are."""

    def __init__(self, task: Task, steps: str, kept_apart: Sequence[str]) -> None:
        super().__init__(task)
        self.steps, self.kept_apart = steps, kept_apart

    def build(self, submodel: Any) -> nn.Module:
        """Build a submodel from a fresh full model."""
        return self.reduced(self.task.build(), submodel)

    def reduced(self, model: nn.Module, submodel: Scaled, check: bool = True) -> nn.Module:
        """Turn a full model, which may be changed, into a submodel, with step sizes.

        A check makes sure that the cut model still computes what it should.
        """
        kept, blocks = self.kept(submodel), self.blocks(submodel)
        if kept is not None:
            model = shrinking.shrink(model, self.task.channels, kept, check=check)
        model = drop_blocks(model, self.task.parts, self.task.hidden_shapes, blocks)
        if self.steps == "fixed":
            return model
        absorb, learns = "absorb" in self.steps, "learn" in self.steps
        return add_step_sizes(model, self.task.parts, blocks, absorb=absorb, learns=learns)

    def blocks(self, submodel: Scaled) -> Sequence[int]:
        """Return the numbers of the blocks of a submodel."""
        every = range(len(self.task.parts.blocks))
        return every if submodel.blocks is None else submodel.blocks

    def kept(self, submodel: Any) -> Kept | None:
        """Return the channels that a submodel keeps of each group; None if it keeps all."""
        if submodel.width == 1:
            return None
        return selection.keep(self.task.channels, submodel.width)

    def traced(self, submodels: Iterable[Submodel]) -> Channels | None:
        """Return the channels that some of these are cut from; None if all have every channel."""
        widths = {getattr(submodel, "width", 1.0) for submodel in submodels}
        return self.task.channels if widths != {1.0} else None

    def slices(self, submodel: Any) -> View:
        """Return where a submodel's tensors live: in the full ones, or in its own."""
        return self.separate(self.shared(submodel), submodel)

    def shared(self, submodel: Scaled) -> View:
        """Return where a submodel's tensors would live if none were its own."""
        kept = self.kept(submodel)
        places = {} if kept is None else shrinking.view(self.task.channels, kept)
        # A block that is left out may be the first place of a tied tensor.
        own = own_tensors(self.module(submodel))
        first = {name: self.task.first_names.get(name, name) for name in own}
        return {name: places.get(first[name], TensorSlice(first[name])) for name in first}

    def apart(self, module: nn.Module) -> set[str]:
        """Return the names of the inconsistent tensors of a submodel."""
        found = super().apart(module)
        for word in self.kept_apart:
            for name in own_tensors(module):
                holder = module.get_submodule(name.rpartition(".")[0])
                if isinstance(holder, KINDS.get(word, ())) or fnmatch(name, word):
                    found.add(name)
        return found

    # ---- looking at submodels without building them

    def sketch(self, submodel: Scaled) -> nn.Module:
        """Return a submodel without data, to learn its cost from."""
        sketch = self.reduced(on_meta(self._example), submodel, check=False)
        learn = {name: p.requires_grad for name, p in self._example.named_parameters()}
        for name, parameter in sketch.named_parameters():
            parameter.requires_grad_(learn.get(name, True))
        return sketch.train()  # As models are built, so that what is known of either serves both.

    @cached_property
    def _example(self) -> nn.Module:
        """A full model that is never changed."""
        return self.task.build()

    def share(self, submodel: Scaled) -> float:
        """Return a submodel's share of the model's parameters: NeFL's gamma."""
        return _count(self.sketch(submodel)) / self._whole

    @cached_property
    def _whole(self) -> int:
        return _count(self.sketch(Scaled()))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
