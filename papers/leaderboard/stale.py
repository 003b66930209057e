"""Results of the leaderboard that today's code would not give: what was sent, against the plan.

    python papers/leaderboard/stale.py femnist [--only m-fedepth]

Results are known by their config, so they stay when the code changes. Which devices are asked in
which round, and what each receives and returns, follows from config and seed: what a run sent must
be that, to the byte, or the run was made by other code. Nothing is trained; a row takes a second or
two, with MiniLM half a minute. Methods that send features are left out: how many depends on each
device's samples, not on its class.
"""

from collections.abc import Iterator
from pathlib import Path

from boards import Task
from shared import HERE, common, results
from sizewise import config
from sizewise.data.dataset import Dataset
from sizewise.errors import BudgetTooSmall
from sizewise.exchange.plan import Plan
from sizewise.runs.preparation import Setting, loaded, prepare
from sizewise.runs.preview import work_of

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


def stale(task: Task, only: str = "") -> Iterator[tuple[str, int, int, int]]:
    """Yield results that are not of today's code: row, seed, bytes sent, and bytes planned."""
    dataset: Dataset | None = None
    for row, tables in task.rows.items():
        if only not in row or config.from_dict(tables).method.name in FEATURES:
            continue
        for run in results.successes(task.found.get(row, ())):
            chosen = config.from_dict({**tables, "seed": run["seed"]})
            dataset = dataset or loaded(chosen)
            sent, expected = run["bytes_down"] + run["bytes_up"], planned(prepare(chosen, dataset))
            if sent != expected:
                yield row, run["seed"], sent, expected


def main() -> None:
    """Name what is stale; end with 1 if there is anything."""
    parser = common.parser(__doc__)
    parser.add_argument("task", help="cifar10, femnist or sst2")
    parser.add_argument("--only", default="", help="rows with this in their names; default: all")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the suite is")
    given = parser.parse_args()
    found = [
        f"{row}, seed {seed}: sent {sent:,} bytes, and would send {expected:,}"
        for row, seed, sent, expected in stale(Task(given.task, given.folder), given.only)
    ]
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
