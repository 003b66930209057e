"""FjORD: every device trains all widths up to its own, one drawn for each batch.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane: "FjORD: Fair and Accurate Federated
Learning under heterogeneous targets with Ordered Dropout", NeurIPS 2021
(https://arxiv.org/abs/2102.13451).

    device k, each batch:  draw p from {p in P, p <= p_k};  step on CE(f_p(x), y)
    with distillation:     step on CE(f_{p_k}(x), y) + CE(f_p(x), softmax(f_{p_k}(x)))
    server:                each entry of w <- mean over the devices with p_k wide enough to hold it

f_p keeps the first ceil(p W) of W channels in all layers. Norm statistics are kept once for each
width (`recipe.norm = "per_width_stats"`); the affine part is shared. `draw = "round"` draws one
width for a whole round, as NeFL runs it. SLT rebuilds the optimiser for each batch, which is
`recipe.momentum = 0`.

Every width is deployed. The two passes of distillation run one after the other, so their
activations are never alive together.

Discloses: the trained weights of each device, to the server.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizewise.common import rng
from sizewise.exchange.plan import TrainingStage
from sizewise.families.nested import NestedWidth, NestedWidths
from sizewise.fleet.devices import Device
from sizewise.steps.step import Loss, backpropagate, compare
from sizewise.training.loop import Shard


class FjORD(NestedWidths):
    """Ordered dropout."""

    recipe_defaults: ClassVar[Mapping[str, Any]] = {"norm": "per_width_stats"}
    divides_batches = False  # A width is drawn for a batch, not for a part of it.

    @dataclass(frozen=True)
    class Options(NestedWidths.Options):
        """Options of FjORD.

        Attributes:
            widths: The set P.
            distil: Let the device's full width teach the drawn one.
            draw: Whether a width is drawn for each batch or for a whole round.
        """

        widths: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
        distil: bool = False
        draw: Literal["batch", "round"] = "batch"

    options: Options

    @property
    def constant_step_cost(self) -> bool:  # type: ignore[override]
        """Whether all steps of a stage need the same bytes."""
        return self.options.draw == "round"

    def fitting(self) -> list[float]:
        """Return the widths that devices train: all up to the largest that anyone can hold."""
        largest = super().fitting()[-1]
        return [width for width in self.widths if width <= largest]

    def trainee(self, width: float) -> NestedWidth:
        """Return the submodel of a width, with all narrower ones inside if each batch draws one."""
        return super().trainee(width) if self.options.draw == "batch" else NestedWidth(width)

    def choose(self, width: float, device: Device, round_index: int) -> NestedWidth:
        """Return what a device of a width trains, or a width drawn for the round."""
        if self.options.draw == "batch":
            return self.trainee(width)
        generator = rng.python_generator(self.task.seed, "width", round_index, device.id)
        return NestedWidth(generator.choice([w for w in self.widths if w <= width]))

    def loss(self, submodel: Any, stage: TrainingStage, shard: Shard | None) -> Loss:
        """Return the loss at a width that is drawn for each batch."""
        loss = _ordered_dropout if shard is not None else _each_width_alone
        return partial(loss, distil=self.options.distil)

    def flops_per_sample(self, submodel: Any, stage: TrainingStage) -> int:
        """Return the FLOPs of training on one sample, in the mean over the drawn widths."""
        widths = (*submodel.within, submodel.width)
        single = [super(FjORD, self).flops_per_sample(NestedWidth(w), stage) for w in widths]
        drawn = sum(single) // len(single)
        # With distillation a step runs two passes: alone, a width is both teacher and taught.
        return (single[-1] + drawn) // 2 if self.options.distil else drawn


def _ordered_dropout(
    module: nn.Module, images: Tensor, labels: Tensor, distil: bool
) -> Iterator[Tensor]:
    """Yield the losses of one step, at a width that is drawn."""
    count = len(getattr(module, "widths", [None]))
    # One choice is no choice, and must not move the random numbers that dropout will draw.
    number = int(torch.randint(count, ())) if count > 1 else 0
    return _at_width(module, images, labels, distil, number)


def _each_width_alone(
    module: nn.Module, images: Tensor, labels: Tensor, distil: bool
) -> Iterator[Tensor]:
    """Yield the losses of the widest, after a pass at each other width: their peaks count as well.

    The widest does not always need the most: gradients of slices are padded, heads are copied.
    """
    widest = len(getattr(module, "widths", [None])) - 1
    for number in range(widest):
        backpropagate(_at_width(module, images, labels, distil, number))
        module.zero_grad(set_to_none=True)
    yield from _at_width(module, images, labels, distil, widest)


def _at_width(
    module: nn.Module, images: Tensor, labels: Tensor, distil: bool, number: int
) -> Iterator[Tensor]:
    widths = getattr(module, "widths", None)
    chosen = partial(module, width=widths[number]) if widths else module
    if not distil:
        yield compare(chosen(images), labels)
        return
    logits = module(images)
    teacher = logits.detach().softmax(dim=-1).flatten(0, -2)
    yield compare(logits, labels)
    del logits
    yield F.cross_entropy(chosen(images).flatten(0, -2), teacher)
