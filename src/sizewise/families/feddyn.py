"""FedDyn: a correction that lets devices with different data agree on where to stop.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic
Regularization", ICLR 2021 (https://arxiv.org/abs/2111.04263). K is the size of the fleet:

    device k:  minimise  L_k(v) - <v, g_k> + a/2 ||v - w||^2;   g_k <- g_k - a (v_k - w)
    server:    h <- h - a (n/K) (mean_k(v_k) - w);   w <- mean_k(v_k) - h / a

where n devices trained a tensor. The two terms beside L_k are, up to a constant, a proximal term
a/2 ||v - (w + g_k / a)||^2. The recipe has such a term already, so a device needs no further bytes:
its memory g_k is added to the anchor before it trains.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sizewise.errors import ConfigError
from sizewise.exchange.view import Tensors
from sizewise.steps.recipe import Recipe

PREFIX = "feddyn/"
"""Where the server's memory has h, before the name of a tensor."""


def proximal(recipe: Recipe, alpha: float) -> Recipe:
    """Return a recipe whose proximal term is FedDyn's, added to its own if it has one."""
    if (recipe.server, recipe.server_lr) != ("fedavg", 1.0):
        raise ConfigError(
            "FedDyn takes the server's step; keep recipe.server = 'fedavg' and "
            "recipe.server_lr = 1, or set method.feddyn = false"
        )
    return replace(recipe, proximal=recipe.proximal + alpha)


def anchor(received: Tensors, memory: Tensors, strength: float) -> dict[str, Tensor]:
    """Return where a device's proximal term pulls: w + g / strength.

    Args:
        received: What the device got, by name.
        memory: Its g, by name; empty at first, and without tensors it never trained.
        strength: That of the whole proximal term: a, and what the recipe adds.
    """
    return {
        name: tensor + memory[name] / strength if name in memory else tensor
        for name, tensor in received.items()
    }


def remembered(
    memory: Tensors, received: Tensors, trained: Tensors, alpha: float
) -> dict[str, Tensor]:
    """Return a device's g after a round, given that before; what it did not train keeps its g."""
    steps = {name: alpha * (tensor - received[name]) for name, tensor in trained.items()}
    return {**memory, **{name: memory.get(name, 0) - step for name, step in steps.items()}}


def correct(
    old: Tensors, merged: Tensors, memory: Tensors, shares: Mapping[str, float], alpha: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take the server's step.

    Args:
        old: Server tensors before the round.
        merged: Server tensors after merging.
        memory: What the server remembers, h among it.
        shares: For each parameter that somebody trained, n / K.
        alpha: The strength a.

    Returns:
        The new server tensors and the new memory. What nobody trained keeps its value and its h.
    """
    tensors, moved = dict(merged), dict(memory)
    for name, share in shares.items():
        before = memory.get(PREFIX + name, torch.zeros_like(old[name]))
        moved[PREFIX + name] = before - alpha * share * (merged[name] - old[name])
        tensors[name] = merged[name] - moved[PREFIX + name] / alpha
    return tensors, moved
