"""Policies for batch norm, by name.

| policy            | evaluates with                | kept once for each size |
|-------------------|-------------------------------|-------------------------|
| `batch`           | statistics of the test batch  | nothing                 |
| `sbn`             | recalibrated on training data | nothing                 |
| `tracked`         | running, merged like weights  | nothing                 |
| `per_width_stats` | running, merged like weights  | statistics              |
| `per_submodel`    | running, merged like weights  | statistics and affine   |

All train with the statistics of the batch. Silent differences here are behind most "cannot
reproduce" threads of the field, so the policy is part of the recipe and named in every report.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from sizewise.errors import ConfigError
from sizewise.exchange.kept_apart import own_name
from sizewise.exchange.view import TensorSlice, View

LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""The norms of torch, of any kind."""

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm):
            yield name, child


def prepare(module: nn.Module, policy: str) -> nn.Module:
    """Make a freshly built model follow a policy; `batch` and `sbn` drop the running statistics."""
    if policy in ("batch", "sbn"):
        for _, norm in _batch_norms(module):
            norm.track_running_stats = False
            for name in _STATISTICS:
                setattr(norm, name, None)
    return module


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether what a model learns from a sample depends on the batch."""
    return any(True for _ in _batch_norms(module))


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a model's result for a sample depends on the batch, also in evaluation."""
    return any(norm.running_mean is None for _, norm in _batch_norms(module))


def refuse_apart(policy: str, method: str) -> None:
    """Raise ConfigError if a method runs a model of a size that devices need not train."""
    if policy in ("per_width_stats", "per_submodel"):
        raise ConfigError(
            f"{method} runs the full model, whose own norms nobody trains with recipe.norm = "
            f"{policy!r}; use 'batch', 'sbn' or 'tracked'"
        )


def kept_apart(module: nn.Module, policy: str) -> set[str]:
    """Return the names of the tensors that the server keeps once for each size."""
    if policy not in ("per_width_stats", "per_submodel"):
        return set()
    affine = ("weight", "bias") if policy == "per_submodel" else ()
    return {f"{name}.{t}" for name, _ in _batch_norms(module) for t in (*affine, *_STATISTICS)}


def separate(view: View, apart: set[str], label: str) -> dict[str, TensorSlice]:
    """Point the tensors that are kept apart at the copies that belong to one submodel.

    Those copies have the submodel's own shape, so nothing of them is cut.
    """
    return {
        local: TensorSlice(own_name(place.name, label)) if local in apart else place
        for local, place in view.items()
    }


@torch.no_grad()
def recalibrate(module: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Give a model static batch-norm statistics: the plain mean over the given batches (sBN).

    The model was prepared with `sbn` and is changed in place; batches of normalised images,
    (B, C, H, W), cover the training data once.
    """
    module.eval()  # Only the norms train: dropout would draw from the global generator.
    device = next(module.parameters()).device
    for _, norm in _batch_norms(module):
        norm.train()
        norm.track_running_stats = True
        norm.momentum = None  # A cumulative average instead of an exponential one.
        norm.running_mean = torch.zeros(norm.num_features, device=device)
        norm.running_var = torch.ones(norm.num_features, device=device)
        norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=device)
    for images in batches:
        module(images.to(device))
    return module.eval()
