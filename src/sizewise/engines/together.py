"""Several devices at once, where a training step is so small that calling it is most of the work.

Devices with the same plan and as many samples hold the same model. Their weights are stacked, and
one call (`torch.func.vmap`) takes the step of all of them, each on its own batch. The sums inside
are added in another order than for one device alone, so the last bits differ; batches do not.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from sizewise.common import rng
from sizewise.exchange.plan import Plan, Update
from sizewise.exchange.view import Tensors
from sizewise.families.base import Method
from sizewise.steps.levers import NONE
from sizewise.steps.optimizers import make_optimizer
from sizewise.steps.step import compare, cross_entropy
from sizewise.torch_tools.placement import device_of, moved, taken_out
from sizewise.training.loop import Shard, stream


def possible(method: Method, plan: Plan, shards: Sequence[Shard]) -> bool:
    """Return whether devices with one plan can train together.

    Their method must leave training as it is, in a single stage with the usual loss; and nothing
    may depend on more than weights and batches: no augmentation, no clipping, no buffers.
    """
    task, stage = method.task, plan.stages[0]
    return (
        type(method).train is Method.train
        and len(plan.stages) == 1
        and stage.levers == NONE
        and task.recipe.precision == "float32"
        and len({len(shard) for shard in shards}) == 1
        and all(method.loss(plan.submodel, stage, shard) is cross_entropy for shard in shards)
        and (task.recipe.augment == "none" or task.recipe.augment_once)
        and task.recipe.clip is None
        and task.recipe.sample_clip is None
        and not any(True for _ in method.submodels.module(plan.submodel).buffers())
        and method.trainer.known_peak(plan, shards[0]) is not None
    )


def fit(
    method: Method, plans: Sequence[Plan], tensors: Tensors, shards: Sequence[Shard]
) -> list[Update]:
    """Train devices for which it is `possible`, and return their updates.

    Their plans are alike but for the device, and each received the same tensors.

    Raises:
        RuntimeError, ValueError: The model does something that cannot be done for several at once,
            such as dropout.
    """
    plan, recipe, count = plans[0], method.task.recipe, len(plans)
    copy = method.submodels.copy(plan.submodel)
    module, stage = copy.load(tensors), copy.actual(plan.stages[0])
    copy.ready(stage)
    names = copy.trained_names([stage])
    device = device_of(module)
    received = {name: moved(tensors[name], device) for name in names}
    start = {name: tensor.expand(count, *tensor.shape) for name, tensor in received.items()}
    weights = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = make_optimizer(recipe, list(weights.values()), stage.lr)

    def loss(weights: Tensors, inputs: Tensor, targets: Tensor) -> Tensor:
        return compare(functional_call(module, dict(weights), (inputs,)), targets)

    step = vmap(grad_and_value(loss))
    seed, total, steps = method.task.seed, torch.zeros(count, device=device), 0
    orders = [
        partial(
            shard.orders,
            recipe.batch,
            rng.torch_generator(seed, "batches", plan.round, plan.device),
            drop_last=recipe.drop_last,
        )
        for plan, shard in zip(plans, shards, strict=True)
    ]
    first = shards[0]
    for chosen in zip(
        *(stream(stage, recipe, one_pass, len(first)) for one_pass in orders), strict=True
    ):
        rows = torch.stack(chosen)  # (devices, batch)
        inputs = moved(first.transform(first.inputs[rows.flatten()], None), device)
        inputs = inputs.reshape(*rows.shape, *inputs.shape[1:])
        held = {name: weight.detach() for name, weight in weights.items()}
        gradients, values = step(held, inputs, moved(first.labels[rows], device))
        for name, weight in weights.items():
            weight.grad = gradients[name]
            if recipe.proximal:
                weight.grad.add_(weight.detach() - start[name], alpha=recipe.proximal)
        optimizer.step()
        total += values
        steps += 1
    peak = method.trainer.known_peak(plan, first)
    ends = {name: taken_out(weight) for name, weight in weights.items()}
    trained = [{name: end[number] for name, end in ends.items()} for number in range(count)]
    losses = (total / max(steps, 1)).tolist()
    return [
        Update(plan, own, len(first), steps, value, peak)
        for plan, own, value in zip(plans, trained, losses, strict=True)
    ]
