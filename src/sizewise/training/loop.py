"""Local training: the steps a device takes on its own data.

There is one training step and one loop around it. Methods choose the model, the loss and the
stages; nothing here knows about any of them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from sizewise.exchange.plan import TrainingStage
from sizewise.exchange.view import Tensors
from sizewise.memory.meter import Meter
from sizewise.steps import per_sample
from sizewise.steps.levers import NONE, Levers
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.per_sample import PerSample
from sizewise.steps.precision import scaler
from sizewise.steps.recipe import Recipe
from sizewise.steps.step import Loss, cross_entropy, rest, training_step
from sizewise.torch_tools.placement import HOST, device_of, moved

T = TypeVar("T")


class Samples(Protocol):
    """What a stage trains on."""

    @property
    def held(self) -> Sequence[Tensor]:
        """Tensors that training has to keep in memory beside a batch."""
        ...

    def __len__(self) -> int: ...

    def batches(
        self, size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one shuffled pass: inputs (B, ...) and labels (B, ...)."""
        ...


@dataclass(frozen=True)
class Shard:
    """One device's training data: its rows of the tensors that all devices share.

    Attributes:
        inputs: The whole training set, uint8 (N, C, H, W), or token ids, int64 (N, T).
        labels: Its labels, (N, ...).
        rows: The device's own row numbers, int64 (n,).
        transform: Augmentation and normalisation of a batch.
    """

    inputs: Tensor
    labels: Tensor
    rows: Tensor
    transform: Callable[[Tensor, torch.Generator | None], Tensor]

    @property
    def held(self) -> Sequence[Tensor]:
        """Nothing: a device reads its samples from wherever it keeps them."""
        return ()

    def __len__(self) -> int:
        return len(self.rows)

    def batches(
        self, size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one shuffled pass over the data: what the model takes (B, ...), labels (B, ...)."""
        for rows in self.orders(size, generator, drop_last=drop_last):
            yield self.transform(self.inputs[rows], generator), self.labels[rows]

    def orders(
        self, size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[Tensor]:
        """Yield the row numbers of each batch of one shuffled pass, int64 (B,)."""
        order = self.rows[torch.randperm(len(self.rows), generator=generator)]
        for rows in torch.split(order, size):
            # Batch norm cannot train on a single sample, so one left over is passed by.
            if len(rows) < size and (drop_last or (len(rows) == 1 and len(order) > 1)):
                return
            yield rows


def freeze(module: nn.Module, trainable: tuple[str, ...] | None) -> list[nn.Parameter]:
    """Let only the parameters under the given name prefixes learn; return them.

    A frozen parameter gets no gradient tensor at all, so neither momentum nor weight decay can
    move it. Parts in which nothing learns are put into evaluation mode.
    """
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(learns(name, trainable))
        parameter.grad = None  # What an earlier stage left would stay alive beside this one.
    rest(module)
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def going_on(moments: Tensors | None, stage: TrainingStage) -> Tensors | None:
    """Return what an optimiser, if it lasts, remembers of the parameters that a stage trains."""
    if moments is None:
        return None
    named = ((key, key.partition("/")[2]) for key in moments)
    return {key: moments[key] for key, name in named if learns(name, stage.trainable)}


def learns(name: str, trainable: tuple[str, ...] | None) -> bool:
    """Return whether a tensor lies under one of the name prefixes; None is all of them."""
    return trainable is None or any(f"{name}.".startswith(f"{prefix}.") for prefix in trainable)


def make_step(
    recipe: Recipe,
    loss: Loss,
    levers: Levers = NONE,
    device: torch.device = HOST,
    private: PerSample | None = None,
) -> Callable[..., Tensor]:
    """Return the training step of a recipe; the same one is trained, metered and predicted."""
    if private is None and recipe.sample_clip is not None:  # To be predicted.
        private = PerSample(recipe.sample_clip, recipe.sample_noise or 0.0)
    step = partial(training_step, loss=loss, clip=recipe.clip, proximal=recipe.proximal)
    if recipe.precision != "float32":
        scales = scaler(recipe.precision, device)
        step = partial(step, precision=recipe.precision, scaler=scales)
    if private is not None:
        step = partial(step, private=private)
    # In which type the optimiser remembers is its own affair, and the step the same.
    acting = replace(levers, state=NONE.state)
    return step if acting == NONE else partial(step, levers=acting)


@dataclass(frozen=True)
class Fit:
    """What a stage of training gave.

    Attributes:
        steps: Optimiser steps.
        loss_sum: The sum of their losses.
        moments: What the optimiser remembers, for another stage that goes on with it; None if
            nobody asked.
    """

    steps: int
    loss_sum: float
    moments: Tensors | None = None


def fit(
    module: nn.Module,
    stage: TrainingStage,
    samples: Samples,
    recipe: Recipe,
    generator: torch.Generator,
    loss: Loss = cross_entropy,
    received: Tensors | None = None,
    meter: Meter | None = None,
    every_step: bool = False,
    parameters: Sequence[nn.Parameter] | None = None,
    moments: Tensors | None = None,
) -> Fit:
    """Train one stage on a device's data.

    Args:
        module: The model, already holding what the device received.
        stage: What learns, how fast, for how long.
        samples: The device's data.
        recipe: Optimiser, batch size, clipping, proximal term.
        generator: Shuffles and augments; the only source of randomness besides dropout.
        loss: What to minimise.
        received: What the device got from the server, by name: where a proximal term pulls.
            Default: the model as it is when the stage begins.
        meter: Watches the first steps, if given. A plan's cost depends on shapes only, so it is
            settled by the first batch of full size that finds the optimiser's state in place; the
            other steps run unwatched and at full speed.
        every_step: Watch all steps.
        parameters: What learns, if the model is ready for it; default: it is made ready now.
        moments: What an earlier optimiser remembers, which is changed as this one goes on; default:
            a fresh one, of which nothing is kept.
    """
    if parameters is None:
        module.train()
        parameters = freeze(module, stage.trainable)
    optimizer = make_optimizer(recipe, parameters, stage.lr, stage.levers)
    device = device_of(module)
    named = module.named_parameters() if recipe.proximal or moments is not None else ()
    learning = [name for name, parameter in named if parameter.requires_grad]
    if moments is not None:
        optimizer.recall(learning, moments)
    anchors: list[Tensor] = []
    if recipe.proximal:
        origin = module.state_dict() if received is None else received
        anchors = [origin[name].detach().to(device, copy=True) for name in learning]
    private = per_sample.make(recipe, generator, device)
    step = make_step(recipe, loss, stage.levers, device, private)
    steps, total, settled = 0, torch.zeros((), device=device), False
    largest = min(recipe.batch, len(samples))
    one_pass = partial(samples.batches, recipe.batch, generator, drop_last=recipe.drop_last)
    for batch in stream(stage, recipe, one_pass, len(samples)):
        inputs, labels = batch if device == HOST else moved(batch, device)
        if meter is not None and (every_step or not settled):
            with meter:
                meter.track(module, optimizer, inputs, labels, anchors, samples.held)
                value = step(module, optimizer, inputs, labels, anchors)
            settled = steps > 0 and len(labels) == largest
        else:
            value = step(module, optimizer, inputs, labels, anchors)
        total += value
        steps += 1
        del inputs, labels  # On the device, there need not be room for two batches.
    kept = None if moments is None else optimizer.moments(learning)
    return Fit(steps, float(total), kept)


def stream(
    stage: TrainingStage, recipe: Recipe, one_pass: Callable[[], Iterator[T]], samples: int
) -> Iterator[T]:
    """Yield the batches of all epochs of a stage, or its part of them, at most `max_steps`."""
    passes = (one_pass() for _ in range(stage.epochs))
    most = _most(stage, recipe, len(_sizes(samples, recipe)))
    return itertools.islice(itertools.chain.from_iterable(passes), most)


def workload(stage: TrainingStage, samples: int, recipe: Recipe) -> tuple[int, int]:
    """Return the steps of a stage and the samples in all of them, for so much data."""
    sizes = _sizes(samples, recipe)
    taken = (sizes * stage.epochs)[: _most(stage, recipe, len(sizes))]
    return len(taken), sum(taken)


def _sizes(samples: int, recipe: Recipe) -> list[int]:
    """Return the sizes of the batches of one pass."""
    whole, rest = divmod(samples, recipe.batch)
    left = rest and not recipe.drop_last and (rest > 1 or not whole)
    return [recipe.batch] * whole + [rest] * bool(left)


def _most(stage: TrainingStage, recipe: Recipe, batches: int) -> int | None:
    """Return after how many batches a stage stops, if a pass has so many."""
    number, parts = stage.part
    if parts == 1:
        return recipe.max_steps
    total = stage.epochs * batches
    own = max(1, (number + 1) * total // parts - number * total // parts)
    return own if recipe.max_steps is None else min(own, recipe.max_steps)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name; tied ones once, by their first name."""
    seen: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    return {name: t for name, t in tensors.items() if seen.setdefault(id(t), name) == name}


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not saved with a model, such as a table of positions."""
    saved = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}


def trained_names(module: nn.Module, stages: Sequence[TrainingStage]) -> list[str]:
    """Return the names of what some stage trains: its parameters, and buffers beside them."""
    parameters = dict(module.named_parameters())
    state = own_tensors(module)
    learned = {name for stage in stages for name in state if learns(name, stage.trainable)}
    holders = {name.rpartition(".")[0] for name in learned if name in parameters}
    return [
        name
        for name in state
        if name in learned or (name not in parameters and name.rpartition(".")[0] in holders)
    ]
