"""Which merge a recipe asks for."""

from functools import partial

from sizewise.exchange import robust_rules
from sizewise.exchange.coverage_mean import CoverageMean
from sizewise.exchange.merging import Merging
from sizewise.exchange.norm_bound import NormBound
from sizewise.exchange.robust_merge import ByEntry, ByVector, MergeByEntry, MergeByVector
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
