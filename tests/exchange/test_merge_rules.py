"""What a merge takes on the server."""

import pytest
import torch

from sizewise.exchange import merge_rules
from sizewise.exchange.view import TensorSlice, View, cut
from sizewise.memory.meter import Meter
from sizewise.steps.recipe import Recipe

SERVER = {"w": torch.zeros(400, 500), "v": torch.zeros(300, 300), "n": torch.tensor(0)}
VIEWS: list[View] = [
    {
        "w": TensorSlice("w", (slice(0, size), slice(0, size))),
        "v": TensorSlice("v", (torch.arange(0, 300, 2), slice(None))),
    }
    for size in (100, 400, 400, 200, 400, 400)
]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(merge="median"),
        Recipe(merge="trimmed-mean"),
        Recipe(merge="krum"),
        Recipe(merge="geometric-median"),
        Recipe(merge="norm-bound"),
        Recipe(merge="norm-bound", merge_bound=1.0),
    ],
    ids=lambda recipe: f"{recipe.merge} {recipe.merge_bound}",
)
def test_the_servers_bytes_are_predicted(recipe: Recipe) -> None:
    updates = [{n: t + k for n, t in cut(SERVER, v).items()} for k, v in enumerate(VIEWS, 1)]
    predicted = merge_rules.bytes_beside(recipe, SERVER, len(updates))
    with Meter() as meter:
        meter.track(SERVER, updates, [s.index for view in VIEWS for s in view.values()])
        before = meter.live
        merging = merge_rules.make(recipe, SERVER)
        for update, view in zip(updates, VIEWS, strict=True):
            merging.add(update, view, 1.0)
        merging.result()
        metered = meter.peak - before
    print(f"{recipe.merge}: {metered:,} of {predicted:,}")
    assert 0.6 * predicted < metered <= predicted
