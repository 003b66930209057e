"""Server optimisers: what to do with the merged update.

The merged mean minus the old tensor is a step that the devices propose. FedAvg takes it as it is;
the others treat it as a negative gradient (Reddi et al., "Adaptive Federated Optimization", ICLR
2021, Algorithm 2, without bias correction):

    d = merged - w;   m <- b1 m + (1 - b1) d
    FedAdagrad  v <- v + d^2
    FedAdam     v <- b2 v + (1 - b2) d^2
    FedYogi     v <- v - (1 - b2) d^2 sign(v - d^2)
    w <- w + eta m / (sqrt(v) + tau)

FedAdamW is FedAdam as `torch.optim.AdamW` has it, for InclusiveFL, whose public code steps that on
the server: moments are corrected for their start at 0, and weights decay by themselves. After t
steps of an entry:

    w <- (1 - eta decay) w + eta m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + tau)

FedAvgM (Hsu et al., 2019): m <- b1 m + d; w <- w + eta m. Only parameters pass through here:
adapting norm statistics leads to negative variances and NaN, so buffers take the merged value.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sizewise.exchange.view import Tensors
from sizewise.steps.recipe import Recipe


def apply(
    recipe: Recipe,
    old: Tensors,
    merged: Tensors,
    memory: Tensors,
    coverage: Mapping[str, bool | Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take the server's step.

    Args:
        recipe: Names the optimiser and its numbers.
        old: Server tensors before the round.
        merged: Server tensors after merging.
        memory: What the server remembers: the moments after the last round, and whatever a method
            keeps beside them.
        coverage: For each tensor that is a parameter, whether somebody trained it, or a mask of
            the entries that somebody did. What nobody trained keeps its value and its moments.

    Returns:
        The new server tensors, and the memory with the new moments.
    """
    if recipe.server == "fedavg" and recipe.server_lr == 1.0:
        return dict(merged), dict(memory)
    tensors, moments = dict(merged), dict(memory)
    for name, covered in coverage.items():
        if covered is False:
            continue
        before = {key: moments.get(f"{key}/{name}") for key in _MOMENTS}
        direction, after = _direction(recipe, merged[name] - old[name], before)
        new = (1 - recipe.server_lr * recipe.server_weight_decay) * old[name]
        tensors[name] = _where(covered, new.add_(recipe.server_lr * direction), old[name])
        for key, moment in after.items():
            moments[f"{key}/{name}"] = _where(covered, moment, before[key])
    return tensors, moments


_MOMENTS = ("first", "second", "steps")


def _where(covered: bool | Tensor, new: Tensor, old: Tensor | None) -> Tensor:
    if isinstance(covered, bool):
        return new
    return torch.where(covered, new, torch.zeros_like(new) if old is None else old)


def _direction(
    recipe: Recipe, step: Tensor, before: Mapping[str, Tensor | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what to add to a parameter for eta = 1, and its new moments.

    Everything is the server's size, so what is not kept is written over: `step` too.
    """
    if recipe.server == "fedavg":
        return step, {}
    known = [before[key] for key in _MOMENTS]
    first, second, steps = (torch.zeros_like(step) if m is None else m for m in known)
    if recipe.server == "fedavgm":
        first = (recipe.server_momentum * first).add_(step)
        return first, {"first": first}
    beta1, beta2 = recipe.server_momentum, recipe.server_beta2
    spare = (1 - beta1) * step
    first = (beta1 * first).add_(spare)
    square = step.square_()
    if recipe.server == "fedadagrad":
        second = second + square
    elif recipe.server in ("fedadam", "fedadamw"):
        second = (beta2 * second).add_(square.mul_(1 - beta2))
    else:
        torch.sub(second, square, out=spare).sign_()
        second = second - square.mul_(1 - beta2).mul_(spare)
    if recipe.server == "fedadamw":
        # Counted entry by entry: some are trained in fewer rounds than others.
        steps = steps + 1
        root = torch.div(second, 1 - beta2**steps, out=spare).sqrt_().add_(recipe.server_tau)
        direction = (first / (1 - beta1**steps)).div_(root)
        return direction, {"first": first, "second": second, "steps": steps}
    root = torch.sqrt(second, out=spare).add_(recipe.server_tau)
    return torch.div(first, root, out=root), {"first": first, "second": second}
