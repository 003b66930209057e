"""Server optimisers: what to do with the merged update.

The merged mean minus the old tensor is a step that the devices propose. FedAvg takes it as it is;
the others treat it as a negative gradient (Reddi et al., "Adaptive Federated Optimization", ICLR
2021, Algorithm 2, without bias correction):

    d = merged - w;   m <- b1 m + (1 - b1) d
    FedAdagrad  v <- v + d^2
    FedAdam     v <- b2 v + (1 - b2) d^2
    FedYogi     v <- v - (1 - b2) d^2 sign(v - d^2)
    w <- w + eta m / (sqrt(v) + tau)

FedAvgM (Hsu et al., 2019): m <- b1 m + d; w <- w + eta m. Only parameters pass through here:
adapting norm statistics leads to negative variances and NaN, so buffers take the merged value.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from sizewise.recipe import Recipe
from sizewise.view import Tensors


def apply(
    recipe: Recipe, old: Tensors, merged: Tensors, memory: Tensors, parameters: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take the server's step.

    Args:
        recipe: Names the optimiser and its numbers.
        old: Server tensors before the round.
        merged: Server tensors after merging; entries nobody covered are unchanged, so their
            proposed step is zero.
        memory: The optimiser's moments after the last round; empty at first.
        parameters: Names of the tensors that are parameters.

    Returns:
        The new server tensors and the new moments.
    """
    if recipe.server == "fedavg" and recipe.server_lr == 1.0:
        return dict(merged), {}
    tensors, moments = dict(merged), dict(memory)
    for name in parameters:
        # A tensor that nobody trained is passed through by reference: no step, no moment update.
        if merged[name] is old[name]:
            continue
        step = merged[name] - old[name]
        tensors[name] = old[name] + recipe.server_lr * _direction(recipe, name, step, moments)
    return tensors, moments


def _direction(recipe: Recipe, name: str, step: Tensor, moments: dict[str, Tensor]) -> Tensor:
    """Return what to add to a parameter for eta = 1, updating its moments."""
    if recipe.server == "fedavg":
        return step
    first, second = f"first/{name}", f"second/{name}"
    before = moments.get(first, torch.zeros_like(step))
    if recipe.server == "fedavgm":
        moments[first] = recipe.server_momentum * before + step
        return moments[first]
    beta1, beta2 = recipe.server_momentum, recipe.server_beta2
    moments[first] = beta1 * before + (1 - beta1) * step
    square, v = step * step, moments.get(second, torch.zeros_like(step))
    if recipe.server == "fedadagrad":
        v = v + square
    elif recipe.server == "fedadam":
        v = beta2 * v + (1 - beta2) * square
    else:
        v = v - (1 - beta2) * square * torch.sign(v - square)
    moments[second] = v
    return moments[first] / (v.sqrt() + recipe.server_tau)
