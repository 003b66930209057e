"""Which channels a narrower model keeps: how many of each group, and which ones.

    keep(channels, 0.5)                              the first half, as in HeteroFL
    keep(channels, 0.5, rolling(round_index))        a window that moves on each round, as FedRolex
    keep(channels, 0.5, random(generator))           any half, as in Federated Dropout
    keep_like(channels, build(width=0.5))            as many as a model that was built narrow

A rule is called once for each group, so whatever shares channels, such as the layers along a
residual stream, shares its choice. The kept channels are sorted: a window that wraps around is the
same set, and cut tensors keep the order of the full ones.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from math import gcd
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from sizewise.common.widths import scaled
from sizewise.cutting.groups import WHOLE, Channels, Group
from sizewise.errors import ModelError

Rule = Callable[[Group, int], Tensor]
"""From a group and a number m to the m channels kept of it: a sorted int64 tensor (m,)."""


def prefix(group: Group, kept: int) -> Tensor:
    """Keep the first channels (HeteroFL, FjORD, NeFL)."""
    return torch.arange(kept)


def rolling(round_index: int, stride: Literal["common", "group"] = "common") -> Rule:
    """Keep a window that moves with the round (FedRolex).

    Over as many rounds as a group has channels, each channel is kept equally often.

    Args:
        round_index: The round, counted from 0.
        stride: How the window moves. `"common"` is the published rule: by one channel each round,
            so groups of equal size have the same window. Neighbouring layers then move in lockstep,
            and pairs of channels that are never in one window are never trained together: with
            quarter windows, half of the weights of PreResNet-20, however long it is trained.
            `"group"` moves each group by a stride of its own, and by one channel more after each
            full turn, which trains all of them within 64 rounds.
    """

    def rule(group: Group, kept: int) -> Tensor:
        start = round_index
        if stride == "group":
            start = round_index * _stride(group) + round_index // group.size
        return ((start + torch.arange(kept)) % group.size).sort().values

    return rule


def _stride(group: Group) -> int:
    """Return a stride that is the group's own; coprime to its size, so that it visits all."""
    return next(islice((s for s in count(1) if gcd(s, group.size) == 1), group.index, None))


def random(generator: torch.Generator) -> Rule:
    """Keep a random subset of each group (Federated Dropout), drawn in the order of the groups."""

    def rule(group: Group, kept: int) -> Tensor:
        return torch.randperm(group.size, generator=generator)[:kept].sort().values

    return rule


def keep(
    channels: Channels,
    ratio: float | Callable[[Group], float],
    rule: Rule = prefix,
    rounding: str = "ceil",
) -> dict[str, Tensor]:
    """Choose the channels of a model at a width ratio.

    Args:
        channels: What `trace` found.
        ratio: Fraction of each group to keep, at most 1; or a function that gives each group its
            own, such as 1 for groups near the input.
        rule: Which ones to keep.
        rounding: How the number is rounded, a rule of `widths.scaled`.

    Raises:
        ModelError: A ratio is not above 0 and at most 1, or the rounding leaves nothing.
    """
    chosen = {}
    for group in channels.groups:
        share = ratio(group) if callable(ratio) else ratio
        if not 0 < share <= 1:
            raise ModelError(f"the kept fraction is above 0 and at most 1; {share} came")
        chosen[group.name] = rule(group, scaled(group.size, share, rounding))
    return chosen


def keep_like(
    channels: Channels, small: nn.Module | Mapping[str, Tensor], rule: Rule = prefix
) -> dict[str, Tensor]:
    """Choose as many channels as a narrower build of the same model has, by the tensors' shapes.

    This follows any rounding that the model's own constructor does, such as a DenseNet whose new
    channels are differences of running totals.

    Args:
        channels: What `trace` found in the full model.
        small: The narrower model, which may be on the meta device, or its tensors by name.
        rule: Which channels to keep.

    Raises:
        ModelError: No choice of channels gives these shapes.
    """
    tensors = small.state_dict() if isinstance(small, nn.Module) else small
    equations = list(_equations(channels, tensors))
    sizes: dict[int, int] = {}
    while open_ones := [e for e in equations if any(g not in sizes for g in e.counts)]:
        # A layer's own outputs name one group; knowing these, concatenations follow.
        equation = min(open_ones, key=lambda e: sum(g not in sizes for g in e.counts))
        if sum(g not in sizes for g in equation.counts) > 1:
            raise ModelError(
                f"the shapes of the narrow model do not say how many channels each group keeps in "
                f"dimension {equation.dim} of {equation.name!r}; use a ratio instead"
            )
        (group,) = (g for g in equation.counts if g not in sizes)
        known = sum(n * sizes[g] for g, n in equation.counts.items() if g != group)
        sizes[group] = (equation.size - known) // equation.counts[group]
    for equation in equations:
        total = sum(n * sizes[g] for g, n in equation.counts.items())
        if total != equation.size or any(
            not 0 < sizes[g] <= channels.groups[g].size for g in equation.counts
        ):
            raise ModelError(
                f"dimension {equation.dim} of {equation.name!r} in the narrow model does not fit "
                "the channels of the full one; build it narrower, from the same factory"
            )
    return {group.name: rule(group, sizes[group.index]) for group in channels.groups}


@dataclass(frozen=True)
class _Equation:
    """That a narrow dimension has `size` entries to share among groups, `counts[g]` per channel."""

    name: str
    dim: int
    size: int
    counts: Mapping[int, int]


def _equations(channels: Channels, tensors: Mapping[str, Tensor]) -> Iterator[_Equation]:
    group_of = np.repeat(
        [group.index for group in channels.groups], [group.size for group in channels.groups]
    )
    for name in channels.saved:
        dims = channels.tensors.get(name, ())
        if name not in tensors or tensors[name].ndim != len(dims):
            raise ModelError(
                f"the narrow model has no tensor {name!r} of {len(dims)} dimensions; build it from "
                "the same factory as the full one"
            )
        for dim, ids in enumerate(dims):
            cut = ids[ids != WHOLE]
            found, entries = np.unique(group_of[cut], return_counts=True)
            counts = {
                int(g): int(n) // channels.groups[g].size
                for g, n in zip(found, entries, strict=True)
            }
            yield _Equation(name, dim, tensors[name].shape[dim] - len(ids) + len(cut), counts)
