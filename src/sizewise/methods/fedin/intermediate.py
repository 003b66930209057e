"""IN training: learning to do what other devices' intermediate layers do (see `methods.fedin`).

A model is an extractor, intermediate layers m, and a classifier: stem, blocks and head. Of a batch,
s_in is what goes into m and s_out what comes out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.steps.step import compare
from sizewise.surgery.anatomy import Anatomy
from sizewise.training.loop import Shard


@dataclass(frozen=True)
class Lesson(Shard):
    """A device's data, other devices' features beside it, and the features it saw itself.

    Attributes:
        pairs: s_in (B, ...) and s_out (B, ...) of other devices; empty: there are none.
        apart: Whether the pairs are batches of their own, after each batch of images.
        full: Size of a batch whose features are noted.
        seen: s_in and s_out of the last such batch.
    """

    pairs: tuple[Tensor, ...] = ()
    apart: bool = False
    full: int = 0
    seen: list[Tensor] = field(default_factory=list)

    @property
    def held(self) -> Sequence[Tensor]:
        """The features: both kinds stay in memory from step to step."""
        return (*self.pairs, *self.seen)

    def note(self, *features: Tensor) -> None:
        """Remember the features of a batch of full size, in place of those before."""
        if len(features[0]) == self.full:
            self.seen[:] = features

    def batches(
        self, size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield one shuffled pass: a tuple of images and pairs, and labels."""
        for images, labels in super().batches(size, generator, drop_last=drop_last):
            if not self.apart:
                yield (images, *self.pairs), labels
                continue
            yield (images,), labels
            yield self.pairs[:1], self.pairs[1]


def ignore(*features: Tensor) -> None:
    """Remember nothing."""


def local(module: nn.Module, images: Tensor, labels: Tensor, split: Anatomy, note: Any) -> Tensor:
    """Return L_local for images (B, C, H, W) and labels (B,), and note the features."""
    early = split.run_stem(module, images)
    late = split.run_blocks(module, early)
    note(early.detach(), late.detach())
    return compare(split.run_head(module, late), labels)


def imitation(module: nn.Module, early: Tensor, late: Tensor, split: Anatomy) -> Tensor:
    """Return the mean squared distance of m(s_in) from s_out, (B, ...) both."""
    return F.mse_loss(split.run_blocks(module, early), late)


def single(
    module: nn.Module,
    inputs: Sequence[Tensor],
    targets: Tensor,
    split: Anatomy,
    note: Any,
    weight: float,
) -> Tensor:
    """Return one of the two losses: of images and labels, or of a batch of pairs."""
    if targets.is_floating_point():
        return weight * imitation(module, inputs[0], targets, split)
    return local(module, inputs[0], targets, split, note)


def joined(
    module: nn.Module,
    inputs: Sequence[Tensor],
    labels: Tensor,
    split: Anatomy,
    note: Any,
    weight: float,
    project: bool,
) -> Iterator[Tensor]:
    """Yield L_local, then L_IN; between and after them, join their gradients.

    Inputs are images (B, C, H, W), s_in and s_out of other devices, labels the images' classes
    (B,); `note` is called with the images' features. To `project` is to replace the sum of the
    gradients of m by the projection rule.
    """
    yield local(module, inputs[0], labels, split, note)
    # Whoever asked for that term has computed its gradients by now.
    named = module.named_parameters()
    middle = [p for n, p in named if p.grad is not None and isinstance(split.part_of(n), int)]
    own = []
    if project:
        own = [p.grad for p in middle]
        for parameter in middle:
            parameter.grad = None
    yield weight * imitation(module, inputs[1], inputs[2], split)
    if project:
        project_off([p.grad for p in middle], own)


def project_off(gradients: Sequence[Tensor | None], own: Sequence[Tensor | None]) -> None:
    """Take out of some gradients, in place, what works against others, over all tensors at once.

    With g the own ones, h becomes h + max(0, -<h, g> / ||g||^2) g.
    """
    pairs = [(h, g) for h, g in zip(gradients, own, strict=True) if h is not None and g is not None]
    if not pairs:
        return
    inner = torch.stack([(h * g).sum() for h, g in pairs]).sum()
    square = torch.stack([(g * g).sum() for _, g in pairs]).sum()
    # Without a branch: a prediction of bytes has no numbers to look at.
    push = (-inner / square.clamp(min=torch.finfo(square.dtype).tiny)).clamp(min=0)
    for h, g in pairs:
        h.add_(push * g)
