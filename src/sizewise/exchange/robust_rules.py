"""Robust rules: what to make of several devices' values when some devices may lie.

Rules by entry get an entry's values in ascending order. Rules by vector get the Gram matrix of the
devices' changes, which holds all their lengths and distances, and say how much each device counts:
so they cost the same however the vectors were gathered. Every device counts the same at first.

    median            the middle value (the mean of both, of an even number)
    trimmed mean      Yin et al. 2018 (https://arxiv.org/abs/1803.01498): the mean without the f
                      smallest and the f largest values
    krum              Blanchard et al. 2017 (https://arxiv.org/abs/1703.02757): the one change whose
                      n - f - 1 nearest others are nearest, in the sum of squared distances (the
                      paper says n - f - 2; ByzFL, which the tests compare with, takes one more)
    geometric median  Pillutla et al. 2022 (https://arxiv.org/abs/1912.13445): the point of the
                      least sum of distances, by Weiszfeld's steps
"""

import torch
from torch import Tensor

from sizewise.steps.recipe import Recipe


def needed(recipe: Recipe) -> int:
    """Return how many devices must cover an entry for a recipe's rule to hold its promise.

    The median, the trimmed mean and the geometric median are drawn anywhere once half of the
    devices lie; Krum's proof asks for 2f + 3. The mean and the norm bound promise nothing that
    depends on the number of devices.
    """
    liars = recipe.merge_attackers
    if recipe.merge in ("mean", "norm-bound"):
        return 1
    return 2 * liars + (3 if recipe.merge == "krum" else 1)


def median(ordered: Tensor, count: Tensor) -> Tensor:
    """Return the median of each entry's values.

    Args:
        ordered: (n, e), ascending; the values of an entry come first, of e entries.
        count: int64 (e,), how many values each entry has, at least 1.
    """
    low = ordered.gather(0, ((count - 1) // 2)[None])[0]
    return torch.lerp(low, ordered.gather(0, (count // 2)[None])[0], 0.5)


def trimmed_mean(ordered: Tensor, count: Tensor, attackers: int) -> Tensor:
    """Return the mean of each entry's values without its extremes; arguments as for `median`.

    Where there are too few values to leave out so many, as many are left out as can be.
    """
    cut = ((count - 1) // 2).clamp(max=attackers)
    place = torch.arange(len(ordered))[:, None]
    inner = (place >= cut) & (place < count - cut)
    return torch.where(inner, ordered, 0).sum(dim=0) / (count - 2 * cut)


def krum(gram: Tensor, attackers: int) -> Tensor:
    """Return 1 for the device that Krum chooses and 0 for the others, (n,).

    Args:
        gram: float64 (n, n), inner products of the devices' changes.
        attackers: How many devices may lie; fewer, where n is too small for so many.
    """
    count = len(gram)
    liars = min(attackers, (count - 1) // 2)
    nearest = _squared_distances(gram).sort(dim=1).values[:, 1 : count - liars]
    chosen = torch.zeros(count, dtype=gram.dtype)
    chosen[nearest.sum(dim=1).argmin()] = 1
    return chosen


def geometric_median(
    gram: Tensor, steps: int = 200, smoothing: float | None = None, tolerance: float = 1e-9
) -> Tensor:
    """Return the share of each device's change in their geometric median, (n,); they add up to 1.

    Args:
        gram: float64 (n, n), inner products of the devices' changes.
        steps: Most steps; the first starts from no change at all.
        smoothing: Distances count as at least this much; default: a millionth of the median length.
        tolerance: Stop when no share moves by more.
    """
    lengths = gram.diagonal().clamp(min=0).sqrt()
    least = float(1e-6 * lengths.median()) if smoothing is None else smoothing
    shares, distances = torch.zeros_like(lengths), lengths
    for _ in range(steps):
        # Where all changes are zero, they are all the same.
        near = 1 / distances.clamp(min=max(least, torch.finfo(gram.dtype).tiny))
        before, shares = shares, near / near.sum()
        if float((shares - before).abs().max()) <= tolerance:
            break
        product = gram @ shares
        distances = (gram.diagonal() - 2 * product + shares @ product).clamp(min=0).sqrt()
    return shares


def _squared_distances(gram: Tensor) -> Tensor:
    lengths = gram.diagonal()
    # Rounding must not hide that each is nearest to itself.
    return (lengths[:, None] + lengths - 2 * gram).clamp(min=0).fill_diagonal_(0)
