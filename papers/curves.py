"""Draw the convergence of a suite's runs: accuracy against rounds, bytes sent and FLOPs.

    python papers/curves.py papers/fedepth/table2.toml [--scale mini] [--only ROW ...]

Reads what `suite.py` left under `runs/papers/` and writes `NAME.SCALE.curves.svg` beside the suite.
Lines are means over the seeds that are there, bands reach from the lowest seed to the highest. Rows
that are all called "METHOD, SETTING" get one line of panels for each setting.
"""

from pathlib import Path

import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

import common
from sizewise.report import records

AXES = ("round", "MB sent, both ways", "TFLOP on devices")

Curves = NDArray[np.float64]
"""(seeds, evaluations, 4): accuracy in percent, then what `AXES` names."""


def read(folder: Path) -> Curves:
    """Return a run's evaluations, (evaluations, 4)."""
    (run,) = records.read([folder])
    return np.array(
        [
            (
                100 * point.value,
                point.costs["round"],
                point.costs["sent"] / 1e6,
                point.costs["flops"] / 1e12,
            )
            for point in run.points
        ]
    )


def stacked(folders: list[Path]) -> Curves:
    """Return the curves of a row's runs, cut to the shortest of them."""
    runs = [read(folder) for folder in folders]
    shortest = min(map(len, runs))
    return np.stack([run[:shortest] for run in runs])


def draw(curves: dict[str, Curves], path: Path) -> None:
    """Draw one line of panels for each setting, one panel for each of `AXES`."""
    split = all(", " in row for row in curves)
    names = {row: tuple(row.rsplit(", ", 1)) if split else (row, "") for row in curves}
    settings = list(dict.fromkeys(setting for _, setting in names.values()))
    methods = list(dict.fromkeys(method for method, _ in names.values()))
    figure, panels = pyplot.subplots(
        len(settings),
        len(AXES),
        figsize=(10, 0.8 + 2.6 * len(settings)),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for row, runs in curves.items():
        method, setting = names[row]
        number = methods.index(method)
        colour = common.COLOURS[number % len(common.COLOURS)]
        dash = "-" if number < len(common.COLOURS) else "--"
        accuracy, costs = runs[..., 0], runs[..., 1:].mean(0)
        for column, axes in enumerate(panels[settings.index(setting)]):
            label = method if column == 0 else None
            x = costs[:, column]
            axes.plot(x, accuracy.mean(0), dash, color=colour, label=label)
            axes.fill_between(x, accuracy.min(0), accuracy.max(0), color=colour, alpha=0.15, lw=0)
    for setting, line in zip(settings, panels, strict=True):
        line[0].set_ylabel(f"accuracy %{', ' if setting else ''}{setting}")
        for axes, label in zip(line, AXES, strict=True):
            axes.set_xlabel(label)
            common.plain(axes)
    handles = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), ncols=4, loc="outside upper center")
    common.save(figure, path)


def main() -> None:
    """Draw what has been run so far."""
    parser = common.parser(__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--only", nargs="*", help="rows to draw; default: all")
    chosen = parser.parse_args()
    found = common.Runs(chosen.suite, chosen.scale).begun(chosen.only)
    curves = {row: stacked(folders) for row, folders in found.items()}
    draw(curves, chosen.suite.with_suffix(f".{chosen.scale}.curves.svg"))


if __name__ == "__main__":
    main()
