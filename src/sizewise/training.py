"""Local training: the steps a device takes on its own data.

There is one training step and one loop around it. Methods choose the model, the loss and the
stages; nothing here knows about any of them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from sizewise.data.augment import Transform
from sizewise.memory import Meter
from sizewise.plan import Stage
from sizewise.recipe import Recipe
from sizewise.view import Tensors

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""From a model, images (B, C, H, W) and labels (B,) to a scalar."""


def cross_entropy(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of a model's logits (B, classes)."""
    return F.cross_entropy(module(images), labels)


@dataclass(frozen=True)
class Shard:
    """One device's training data: its rows of the tensors that all devices share.

    Attributes:
        images: The whole training set, uint8 (N, C, H, W).
        labels: Its labels, int64 (N,).
        rows: The device's own row numbers, int64 (n,).
        transform: Augmentation and normalisation of a batch.
    """

    images: Tensor
    labels: Tensor
    rows: Tensor
    transform: Transform

    def __len__(self) -> int:
        return len(self.rows)

    def batches(
        self, size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one shuffled pass over the data as float images (B, C, H, W) and labels (B,)."""
        order = self.rows[torch.randperm(len(self.rows), generator=generator)]
        for rows in torch.split(order, size):
            # Batch norm cannot train on a single sample, so one left over is passed by.
            if len(rows) < size and (drop_last or (len(rows) == 1 and len(order) > 1)):
                return
            yield self.transform(self.images[rows], generator), self.labels[rows]


def make_optimizer(recipe: Recipe, parameters: Sequence[nn.Parameter], lr: float) -> Optimizer:
    """Return a fresh optimiser over the parameters that learn."""
    if recipe.optimizer == "sgd":
        return SGD(parameters, lr, recipe.momentum, weight_decay=recipe.weight_decay)
    kind = Adam if recipe.optimizer == "adam" else AdamW
    return kind(parameters, lr, weight_decay=recipe.weight_decay)


def freeze(module: nn.Module, trainable: tuple[str, ...] | None) -> list[nn.Parameter]:
    """Let only the parameters under the given name prefixes learn; return them.

    A frozen parameter gets no gradient tensor at all, so neither momentum nor weight decay can
    move it (METHODS 2.12).
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(learns(name, trainable))
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def learns(name: str, trainable: tuple[str, ...] | None) -> bool:
    """Return whether a tensor lies under one of the name prefixes; None is all of them."""
    return trainable is None or any(f"{name}.".startswith(f"{prefix}.") for prefix in trainable)


@dataclass(frozen=True)
class Step:
    """One optimiser step, the same when trained, metered and predicted.

    Attributes:
        loss: What to minimise.
        clip: Largest global norm of the gradient.
        proximal: FedProx's mu.
    """

    loss: Loss = cross_entropy
    clip: float | None = None
    proximal: float = 0.0

    def __call__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        images: Tensor,
        labels: Tensor,
        anchors: Sequence[Tensor] = (),
    ) -> Tensor:
        """Take the step and return the loss, detached.

        Args:
            module: The model.
            optimizer: Over the parameters that learn.
            images: Float images (B, C, H, W).
            labels: Labels (B,).
            anchors: The received values of those parameters, in the optimiser's order; needed
                only when `proximal` is positive.
        """
        optimizer.zero_grad(set_to_none=True)
        loss = self.loss(module, images, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = optimizer.param_groups[0]["params"]
        if self.proximal:
            # The gradient of mu/2 ||w - anchor||^2, added without building it into the graph.
            with torch.no_grad():
                for parameter, anchor in zip(parameters, anchors, strict=True):
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter - anchor, alpha=self.proximal)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip)
        optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class Fit:
    """What a stage of training gave: optimiser steps, the sum of their losses, the metered peak."""

    steps: int
    loss_sum: float
    peak_bytes: int | None


METERED_STEPS = 2
"""Steps to watch: the second is the first one that finds the optimiser's state in place."""


def fit(
    module: nn.Module,
    stage: Stage,
    shard: Shard,
    recipe: Recipe,
    generator: torch.Generator,
    *,
    loss: Loss = cross_entropy,
    meter: Meter | None = None,
) -> Fit:
    """Train one stage on a device's data.

    Args:
        module: The model, already holding what the device received.
        stage: What learns, how fast, for how long.
        shard: The device's data.
        recipe: Optimiser, batch size, clipping, proximal term.
        generator: Shuffles and augments; the only source of randomness besides dropout.
        loss: What to minimise.
        meter: Watches the first steps, if given. A plan's cost depends on shapes only, so the
            other steps run unwatched and at full speed.
    """
    module.train()
    parameters = freeze(module, stage.trainable)
    optimizer = make_optimizer(recipe, parameters, stage.lr)
    anchors = [p.detach().clone() for p in parameters] if recipe.proximal else []
    step = Step(loss, recipe.clip, recipe.proximal)
    steps, total = 0, torch.zeros(())
    for images, labels in _stream(stage, shard, recipe, generator):
        if meter is not None and steps < METERED_STEPS:
            with meter:
                meter.track(module, optimizer, images, labels, anchors)
                value = step(module, optimizer, images, labels, anchors)
        else:
            value = step(module, optimizer, images, labels, anchors)
        total += value
        steps += 1
    return Fit(steps, float(total), meter.peak if meter else None)


def _stream(
    stage: Stage, shard: Shard, recipe: Recipe, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs of a stage, at most `max_steps` of them."""
    passes = (
        shard.batches(recipe.batch, generator, drop_last=recipe.drop_last)
        for _ in range(stage.epochs)
    )
    return itertools.islice(itertools.chain.from_iterable(passes), recipe.max_steps)


@torch.no_grad()
def load(module: nn.Module, tensors: Tensors) -> None:
    """Copy tensors into a model by name; every tensor of the model must be given."""
    own = module.state_dict(keep_vars=True)
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def trained(module: nn.Module, stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Return copies of what some stage trained: its parameters, and buffers beside them.

    Frozen tensors are left out: they are not sent and do not count as covered.
    """
    parameters = dict(module.named_parameters())
    learned = {name for stage in stages for name in parameters if learns(name, stage.trainable)}
    holders = {name.rpartition(".")[0] for name in learned}
    return {
        name: tensor.detach().clone()
        for name, tensor in module.state_dict().items()
        if name in learned or (name not in parameters and name.rpartition(".")[0] in holders)
    }
