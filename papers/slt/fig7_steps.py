"""SLT, Figure 7: accuracy and step over the rounds of a run.

    python papers/slt/fig7_steps.py [--scale mini] [--suite papers/slt/table1.toml]

Reads what `suite.py` left under `runs/papers/` and writes `fig7_steps.SCALE.svg`: one panel for
each row of the suite that trains with slt; lines are means over the seeds that are there. The paper
has ResNet-20, ResNet-44 and DenseNet-40; Table 1 has ResNet-20 at several constraints.
"""

import argparse
import json
import tomllib
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes

HERE = Path(__file__).parent
BLUE, RED = "#4477aa", "#ee6677"


def accuracies(folder: Path) -> dict[int, float]:
    """Return a run's accuracy in percent by round."""
    lines = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return {line["round"]: 100 * line["accuracy"] for line in lines if "accuracy" in line}


def steps(folder: Path) -> dict[int, int]:
    """Return a run's step by round: how many layers had full width."""
    lines = map(json.loads, (folder / "updates.jsonl").read_text().splitlines())
    full = {line["round"]: line["cut"].get("full") for line in lines if "cut" in line}
    # Of the full model itself no cut is noted; it comes after all others.
    last = max((step for step in full.values() if step is not None), default=-1) + 1
    return {number: last if step is None else step for number, step in full.items()}


def draw(axes: Axes, folders: list[Path], title: str) -> None:
    """Draw the runs of one row: accuracy on the left, steps on the right."""
    runs = [accuracies(folder) for folder in folders]
    rounds = sorted(set(runs[0]).intersection(*runs[1:]))
    axes.plot(rounds, [np.mean([run[r] for run in runs]) for r in rounds], color=BLUE)
    right = axes.twinx()
    found = steps(folders[0])  # The same in all seeds, unless they stop early.
    right.step(list(found), list(found.values()), color=RED, where="mid")
    axes.set_title(title)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy %", color=BLUE)
    right.set_ylabel("step", color=RED)


def main() -> None:
    """Draw what has been run so far."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", choices=("mini", "paper"), default="mini")
    parser.add_argument("--suite", type=Path, default=HERE / "table1.toml")
    chosen = parser.parse_args()
    suite = tomllib.loads(chosen.suite.read_text(encoding="utf-8"))
    runs = Path("runs/papers", f"slt-{chosen.suite.stem}-{chosen.scale}")
    rows: dict[str, list[Path]] = {}
    for row, changes in suite["row"].items():
        name = row.replace(" ", "_").replace("/", "_")
        paths = [runs / f"{name}-{seed}" for seed in suite["scale"][chosen.scale]["seeds"]]
        begun = [path for path in paths if (path / "history.jsonl").exists()]
        if changes["method"]["name"] == "slt" and begun:
            rows[row] = begun
    if not rows:
        raise SystemExit(f"{runs} has no runs; start them with papers/suite.py {chosen.suite}")
    size = (4 * len(rows), 3)
    figure, panels = pyplot.subplots(
        1, len(rows), figsize=size, layout="constrained", squeeze=False
    )
    for (row, folders), axes in zip(rows.items(), panels[0], strict=True):
        draw(axes, folders, row)
    path = HERE / f"fig7_steps.{chosen.scale}.svg"
    pyplot.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}
    figure.savefig(path, metadata={"Date": None})
    print(path)


if __name__ == "__main__":
    main()
