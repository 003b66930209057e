"""NeFL, Figure 3: what the submodels of a finished run learned.

    python papers/nefl/fig3.py [RUN_DIR] [--name fig3.mini]

(a) the step sizes of each block; (b) the mean absolute value of the weights of each layer, which is
their L1 norm over their number, for each submodel. Both are read from the run's final tensors; the
default run is that of NeFL in `table1.toml` at mini scale, IID, seed 0. Layers are convolutions and
linear maps; the first and the last are the stem and the classifier. Submodels share these weights
and differ in how many of them they hold.

The run's data must be where it was (SIZEWISE_DATA), as it says what the model looks like. Writes
`NAME.md` and `NAME.svg` into this folder, or where `--name` says.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from torch import nn

import shared
from shared import common, inside
from sizewise.surgery.step_sizes import StepSize

DEFAULT = "runs/papers/nefl-table1-mini/NeFL,_IID-0"

Table = dict[str, dict[str, float]]
"""A number for each submodel, and in it for each block or layer by name."""


def step_sizes(module: nn.Module) -> dict[str, float]:
    """Return the step sizes of a submodel, by where they are."""
    return {
        _short(name): float(part.size.detach())
        for name, part in module.named_modules()
        if isinstance(part, StepSize)
    }


def weights(module: nn.Module) -> dict[str, float]:
    """Return the mean absolute value of each layer's weights."""
    return {
        _short(name): float(layer.weight.detach().abs().mean())
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }


def _short(name: str) -> str:
    """Return a path for people: block 3 conv1, counted from 1."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    short = f"block {int(match[1]) + 1} {match[2]}" if match else name
    return short.replace(".", " ").removesuffix(" branch")


def in_order(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return all blocks or layers in the order of the largest submodel, which has them all."""
    names: dict[str, None] = {}
    for row in reversed(list(table.values())):
        names |= dict.fromkeys(row)
    return list(names)


def draw(axes: Axes, table: Table, label: str) -> None:
    """Draw one line for each submodel; blocks that it lacks are left out."""
    names = in_order(table)
    for colour, (size, row) in zip(common.COLOURS, table.items(), strict=False):
        values = [row.get(name, math.nan) for name in names]
        axes.plot(range(len(names)), values, "o-", color=colour, ms=3, label=size)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_ylabel(label)
    common.plain(axes)


def lines(table: Table, title: str, form: str) -> list[str]:
    """Return a Markdown table, one column for each submodel."""
    found = common.table(title, *table)
    for name in in_order(table):
        cells = (f"{row[name]:{form}}" if name in row else "" for row in table.values())
        found.append(f"| {name} | {' | '.join(cells)} |")
    return found


def main() -> None:
    """Read the run, draw the figure, write the tables."""
    parser = common.parser(__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path(DEFAULT))
    parser.add_argument("--name", type=Path, default=shared.HERE / "fig3.mini")
    chosen = parser.parse_args()
    steps: Table = {}
    norms: Table = {}
    for size, module in inside.filled_submodels(chosen.run).items():
        steps[size], norms[size] = step_sizes(module), weights(module)
    panels = {"step size": (steps, ".3f"), "mean absolute weight": (norms, ".5f")}
    panels = {label: pair for label, pair in panels.items() if any(pair[0].values())}
    figure, places = pyplot.subplots(
        1, len(panels), figsize=(6 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    text = [f"From `{chosen.run}`."]
    for axes, (label, (table, form)) in zip(places.flat, panels.items(), strict=True):
        draw(axes, table, label)
        text += ["", *lines(table, label, form)]
    if "step size" in panels:
        places.flat[0].axhline(1, color="black", lw=0.5)
    handles = places.flat[0].get_legend_handles_labels()
    figure.legend(*handles, ncols=3, loc="outside upper center")
    name = chosen.name if chosen.name.parent != Path() else shared.HERE / chosen.name
    common.save(figure, name.with_name(f"{name.name}.svg"))
    common.write(text, name.with_name(f"{name.name}.md"))


if __name__ == "__main__":
    main()
