"""The sizes that a method hands out, ranked: one accuracy never tells what all devices get."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any


def ranking(accuracy: float | None, sizes: Mapping[str, float]) -> dict[str, Any]:
    """Return which size a run's accuracy is of, and the best, the worst and the mean of all.

    `main` is None where the one figure to show for the run is a mean over sizes.
    """
    if not sizes:
        return {"main": None, "best": None, "worst": None, "mean": None}
    best, worst = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
    return {
        # Of equals the last: most methods show their largest size, which comes last.
        "main": next((size for size in reversed(list(sizes)) if sizes[size] == accuracy), None),
        "best": {"size": best, "accuracy": sizes[best]},
        "worst": {"size": worst, "accuracy": sizes[worst]},
        "mean": fmean(sizes.values()),
    }
