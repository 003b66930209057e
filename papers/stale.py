"""Results of a suite that today's code would not give: what was sent, against the plan.

    python papers/stale.py papers/leaderboard/femnist.toml [--scale mini] [--only m-fedepth]

Results are known by their config, so they stay when the code changes. Which devices are asked in
which round, and what each receives and returns, follows from config and seed: what a run sent must
be that, to the byte, or the run was made by other code. Nothing is trained; a row takes a second or
two, with MiniLM half a minute. Methods that send features are left out: how many depends on each
device's samples, not on its class.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import common
from results import Results, successes
from sizewise import config
from sizewise.data.dataset import Dataset
from sizewise.errors import BudgetTooSmall
from sizewise.exchange.plan import Plan
from sizewise.runs.preparation import Setting, loaded, prepare
from sizewise.runs.preview import work_of
from suite import rows_of

FEATURES = ("fedin", "fedgkt")
"""Methods that send features of samples."""


def planned(setting: Setting) -> int:
    """Return the bytes that a run sends, both ways."""
    method, state = setting.method, setting.start
    sizes: dict[object, int] = {}
    total = 0
    for number in range(setting.config.rounds):
        for device in setting.fleet.sample(setting.config.seed, number):
            try:
                plan = method.plan(state, device, number)
            except BudgetTooSmall:
                continue
            if (key := _work(plan)) not in sizes:
                work = work_of(setting, state, plan)
                sizes[key] = work["bytes_down"] + work["bytes_up"]
            total += sizes[key]
    return total


def _work(plan: Plan) -> object:
    """Return what a plan's bytes depend on."""
    return plan.submodel, tuple(stage.trainable for stage in plan.stages)


def stale(runs: common.Runs, only: str = "") -> Iterator[tuple[str, int, int, int]]:
    """Yield results that are not of today's code: row, seed, bytes sent, and bytes planned."""
    datasets: dict[str, Dataset] = {}
    known = Results(runs.suite.with_suffix(f".{runs.scale}.json")).rows
    for row, tables in rows_of(runs.tables, runs.scale)[0].items():
        if only not in row or config.from_dict(tables).method.name in FEATURES:
            continue
        for run in successes(known.get(row, ())):
            chosen = config.from_dict({**tables, "seed": run["seed"]})
            if (data := json.dumps(tables.get("data"), sort_keys=True)) not in datasets:
                datasets[data] = loaded(chosen)
            setting = prepare(chosen, datasets[data])
            sent, expected = run["bytes_down"] + run["bytes_up"], planned(setting)
            if sent != expected:
                yield row, run["seed"], sent, expected


def main() -> None:
    """Name what is stale; end with 1 if there is anything."""
    parser = common.parser(__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--scale", default="mini")
    parser.add_argument("--only", default="", help="rows with this in their names; default: all")
    given = parser.parse_args()
    found = [
        f"{row}, seed {seed}: sent {sent:,} bytes, and would send {expected:,}"
        for row, seed, sent, expected in stale(common.Runs(given.suite, given.scale), given.only)
    ]
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
