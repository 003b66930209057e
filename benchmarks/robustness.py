"""What each merging rule makes of each attack: accuracy of the full model on digits.

    python benchmarks/robustness.py [--seeds 0 1] [--smoke]

Twenty devices, all of them in every round: 8 small ones and 12 that hold the whole model; a fifth
of all attack. In the rows of one large device, 19 are small. HeteroFL gives small devices fewer
channels; FeDepth lets them train block after block, without the first, for which they lack bytes.
Samples differ from device to device (Dirichlet, alpha 1). Runs that are in robustness.json are not
run again.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
from sizewise import config as configs
from sizewise.runs import session

RESULTS = Path(__file__).with_suffix(".json")
RULES = ("mean", "median", "trimmed-mean", "geometric-median", "krum", "norm-bound")
ROUNDS = 15


@dataclass(frozen=True)
class Row:
    """A row of the table: who attacks how, in which fleet, and what becomes of thin entries."""

    title: str
    attack: dict[str, Any] = field(default_factory=dict)
    large: int = 12
    thin: str = "keep"
    methods: tuple[str, ...] = ("heterofl", "fedepth")


FLIP = {"kind": "sign-flip", "strength": 5.0}
CLAIM = {**FLIP, "count": 4, "group": "small", "claims": "large"}
OUTER = {"kind": "outer", "count": 1, "group": "large"}
WIDTHS = ("heterofl",)
ROWS = (
    Row("nobody attacks"),
    Row("sign flip, 5 times", FLIP),
    Row("noise, 10 times their change", {"kind": "noise"}),
    Row("scaling, 10 times", {"kind": "scaling"}),
    Row("label flip", {"kind": "label-flip"}),
    Row("a little is enough, 1.5 deviations", {"kind": "little-is-enough"}),
    Row("inner product, 5 times", {"kind": "inner-product", "strength": 5.0}),
    Row("sign flip, and 10 times their samples claimed", {"kind": "sign-flip", "samples": 10.0}),
    Row("sign flip, 5 times, by 4 small ones that claim to be large", CLAIM),
    Row("1 large device, honest", large=1),
    Row("1 large device, honest; thin ones merged", large=1, thin="merge", methods=WIDTHS),
    Row("1 large device flips what only it has, 10 times", OUTER, large=1),
    Row("the same, thin ones merged", OUTER, large=1, thin="merge", methods=WIDTHS),
    Row("1 large device, 4 small claim to be; sign flip, 5 times", CLAIM, large=1, methods=WIDTHS),
    Row("likewise, thin ones merged", CLAIM, large=1, thin="merge", methods=WIDTHS),
)


def tables(row: Row, method: str, rule: str, seed: int, rounds: int) -> dict[str, Any]:
    """Return the config of a run."""
    groups = [
        {"name": "small", "count": 20 - row.large, "ratio": 0.6},
        {"name": "large", "count": row.large, "ratio": 1.0},
    ]
    attack = [row.attack] if row.attack else []
    return {
        "seed": seed,
        "rounds": rounds,
        "model": {"name": "cnn", "args": {"layers": [8, 16, 16, 32]}},
        "data": {"name": "digits", "partition": "balanced-dirichlet", "alpha": 1.0},
        "fleet": {"per_round": 20, "group": groups, "attack": attack},
        "method": {"name": method},
        "recipe": {
            "batch": 16,
            "lr": 0.05,
            "merge": rule,
            "merge_attackers": 4,
            # The mean and the norm bound know no thin entries.
            "merge_thin": "keep" if rule in ("mean", "norm-bound") else row.thin,
            "eval_every": rounds,
        },
        "engine": {"save_every": rounds},
    }


def accuracy(run: dict[str, Any]) -> float:
    """Return the accuracy of the full model after a run."""
    with (
        tempfile.TemporaryDirectory() as folder,
        session.started(configs.from_dict(run), Path(folder) / "run") as federation,
    ):
        return float(federation.run()["accuracy"])


def lines(rows: tuple[Row, ...], seeds: list[int], rounds: int, keep: bool) -> Iterator[str]:
    """Yield the table's lines; run what has not been run."""
    done: dict[str, float] = json.loads(RESULTS.read_text()) if keep and RESULTS.exists() else {}
    yield common.head("accuracy, %", *RULES)
    for method in ("heterofl", "fedepth"):
        for row in (row for row in rows if method in row.methods):
            cells = []
            for rule in RULES:
                found = []
                for seed in seeds:
                    key = f"{method}: {row.title} | {rule} | {seed}"
                    if key not in done:
                        done[key] = accuracy(tables(row, method, rule, seed, rounds))
                        if keep:
                            RESULTS.write_text(json.dumps(done, indent=0) + "\n")
                    found.append(100 * done[key])
                spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
                cells.append(f"{statistics.fmean(found):.1f}{spread}")
            yield f"| {method}: {row.title} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table, row by row."""
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    given = parser.parse_args()
    rows, seeds, rounds = (ROWS[1:2], [0], 1) if given.smoke else (ROWS, given.seeds, ROUNDS)
    for line in lines(rows, seeds, rounds, keep=not given.smoke):
        print(line, flush=True)


if __name__ == "__main__":
    main()
