"""Which merge a recipe asks for, and what it takes on the server."""

from functools import partial

from sizewise.exchange import robust_rules
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.merging import Merging
from sizewise.exchange.norm_bound import NormBound
from sizewise.exchange.robust_merge import (
    CHUNK,
    ByEntry,
    ByVector,
    MergeByEntry,
    MergeByVector,
)
from sizewise.exchange.view import Tensors
from sizewise.steps.recipe import Recipe


def make(recipe: Recipe, tensors: Tensors) -> Merging:
    """Return what merges the updates of one round, as a recipe says.

    Args:
        recipe: Whose `merge` keys count.
        tensors: The server's tensors before the round.
    """
    attackers = recipe.merge_attackers
    if recipe.merge == "mean":
        return CoverageMean(tensors)
    if recipe.merge == "norm-bound":
        return NormBound(tensors, recipe.merge_bound)
    needed = 1 if recipe.merge_thin == "merge" else robust_rules.needed(recipe)
    by_entry: dict[str, ByEntry] = {
        "median": robust_rules.median,
        "trimmed-mean": partial(robust_rules.trimmed_mean, attackers=attackers),
    }
    if recipe.merge in by_entry:
        return MergeByEntry(tensors, by_entry[recipe.merge], needed)
    by_vector: dict[str, ByVector] = {
        "krum": partial(robust_rules.krum, attackers=attackers),
        "geometric-median": robust_rules.geometric_median,
    }
    return MergeByVector(tensors, by_vector[recipe.merge], needed)


def streams(recipe: Recipe) -> bool:
    """Return whether updates are forgotten as soon as they are merged."""
    return recipe.merge == "mean" or (
        recipe.merge == "norm-bound" and recipe.merge_bound is not None
    )


def bytes_beside(recipe: Recipe, tensors: Tensors, devices: int) -> int:
    """Return what a rule other than the mean takes at most, beside the model and the updates.

    Args:
        recipe: Whose `merge` keys count.
        tensors: The server's tensors.
        devices: How many updates a round has.
    """
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    merged = sum(tensor.nbytes for tensor in floats)
    largest = max((tensor.nbytes for tensor in floats), default=0)
    entries = max((tensor.numel() for tensor in floats), default=0)
    if recipe.merge == "norm-bound":
        # Sums; then lengths in float64, or an update that is shortened and the result.
        return merged + max(3 * 8 * entries, 2 * merged)
    # Tensors are merged one by one: all devices' values of one side by side, and who has which.
    side_by_side = devices * (largest + entries)
    if recipe.merge in ("median", "trimmed-mean"):
        # How many devices each entry has; a chunk in order, with places, twice, and masks.
        return merged + side_by_side + 4 * entries + 32 * CHUNK
    # The block of each entry, and entries in the order of blocks; a chunk in float64.
    return merged + side_by_side + 3 * 8 * entries + 32 * CHUNK
