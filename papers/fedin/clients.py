"""FedIN, Table II by devices: mean, worst and by architecture, each device's own model.

    python papers/fedin/clients.py [--scale mini] [--suite papers/fedin/table2.toml]

Reads the results that `papers/suite.py` wrote and writes `clients.SCALE.md` beside the suite: for
each row the accuracy of all devices' models on the whole test set, their mean, the worst, and the
mean for each architecture; for FedGKT with and without its server; for HeteroFL the levels, which
count as often as devices have them. Means over seeds.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import shared
from shared import common

PUBLISHED = {
    "FedIN": 63.00,
    "FedAvg, model B": 60.02,
    "FedGKT, server": 55.11,
    "FedGKT, clients": 39.96,
    "HeteroFL": 64.89,
}
"""CIFAR-10, Dirichlet 0.5: the paper's Table II."""

LEVELS = {1.0: 4, 0.5: 2, 0.25: 2, 0.125: 1, 0.0625: 1}


def devices(row: str, sizes: Mapping[str, float]) -> dict[str, list[tuple[str, float]]]:
    """Return what every device's model scores, by the name of a line: (architecture, accuracy)."""
    if row.startswith("HeteroFL"):
        counts = {f"width {width:.4g}": count for width, count in LEVELS.items()}
        counts["full"] = LEVELS[1.0]
        return {row: [pair for pair in sizes.items() for _ in range(counts[pair[0]])]}
    if row.startswith("FedGKT"):
        ends = {name: name.endswith("with server") for name in sizes}
        return {
            f"{row}, server": [("with server", sizes[n]) for n, server in ends.items() if server],
            f"{row}, clients": [("alone", sizes[n]) for n, server in ends.items() if not server],
        }
    if len(sizes) == 1:
        return {row: [("", accuracy) for accuracy in sizes.values() for _ in range(10)]}
    kinds = {name: re.fullmatch(r"device \d+ \((.*)\)", name) for name in sizes}
    return {row: [(kind[1] if kind else name, sizes[name]) for name, kind in kinds.items()]}


def main() -> None:
    """Write the table."""
    chosen = common.runs_of(__doc__, shared.HERE / "table2.toml")
    path = chosen.suite.with_suffix(f".{chosen.scale}.json")
    results: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
    heads = ("mean %", "by seed", "worst %", "by architecture %", "published %")
    lines = common.table("", *heads)
    for row, runs in results.items():
        per_seed: dict[str, list[list[tuple[str, float]]]] = defaultdict(list)
        for result in runs:
            for name, found in devices(row, result["sizes"]).items():
                per_seed[name].append(found)
        for name, seeds in per_seed.items():
            means = [100 * fmean(accuracy for _, accuracy in found) for found in seeds]
            worst = fmean(100 * min(accuracy for _, accuracy in found) for found in seeds)
            kinds: dict[str, list[float]] = defaultdict(list)
            for kind, accuracy in (pair for found in seeds for pair in found):
                kinds[kind.replace("fedin_", "model ")].append(accuracy)
            apart = {kind: f"{100 * fmean(found):.1f}" for kind, found in kinds.items()}
            shown = ", ".join(f"{k} {v}" for k, v in apart.items()) if len(apart) > 1 else ""
            published = PUBLISHED.get(name)
            lines.append(
                f"| {name} | {fmean(means):.1f} | {' '.join(f'{mean:.1f}' for mean in means)} "
                f"| {worst:.1f} | {shown} | {'' if published is None else f'{published:.2f}'} |"
            )
    common.write(lines, chosen.beside(__file__, "md"))


if __name__ == "__main__":
    main()
