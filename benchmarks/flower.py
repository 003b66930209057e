"""Seconds per round on Flower over the in-process engine, for the same work.

    python benchmarks/flower.py [--rounds N] [--devices N] [--set KEY=VALUE]... [--smoke]

A SuperLink and one SuperNode per device run on loopback, as processes of their own; every device
takes part in every round. Both sides train the same devices on the same samples and must end with
the same `state_sha256`. The first round of each is left out: it builds models and waits for nodes.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import common
from sizewise import config as configs
from sizewise.config import Config
from sizewise.flower import folder as flower_folder
from sizewise.runs import session

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/flower"))
from deployment import Deployment

BUDGETS = ["900kB", "1200kB", "5MB"]


def make_config(devices: int, rounds: int, overrides: list[str]) -> Config:
    """Return FeDepth on digits, for devices of three sizes."""
    values = [
        f"rounds={rounds}",
        "engine.workers=1",
        "model.name=preresnet8",
        "method.name=fedepth",
        f"fleet.devices={devices}",
        f"fleet.per_round={devices}",
        f"fleet.budgets={json.dumps(BUDGETS[:devices])}",
        "recipe.batch=16",
    ]
    return configs.load(None, [*values, *overrides])


def seconds(folder: Path) -> list[float]:
    """Return what each round took, but for the first."""
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines][1:]


def here(config: Config, folder: Path) -> dict[str, Any]:
    """Run in this process."""
    with session.started(config, folder) as federation:
        return federation.run()


@dataclass(frozen=True)
class Phases:
    """Where the seconds between the ends of two rounds of nodes went.

    Attributes:
        away: From the last reply of a round to the first message of the next that a node has: the
            server sees the reply, merges, scores, saves and plans, and the node looks.
        nodes: From then on to the last reply.
        training: What training took of that, of the device that took longest.
    """

    away: float
    nodes: float
    training: float


def phases(logs: list[str], folder: Path) -> list[Phases]:
    """Return where the seconds of each round went, by the clocks of nodes, but for the first."""
    updates = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    rounds = range(1, 1 + max(update["round"] for update in updates))
    received = [times(log, "received train") for log in logs]
    answered = [times(log, "answered train") for log in logs]
    found = []
    for number in rounds[1:]:
        last = max(node[number - 2] for node in answered)
        first, end = (
            min(node[number - 1] for node in received),
            max(n[number - 1] for n in answered),
        )
        training = max(update["seconds"] for update in updates if update["round"] == number)
        found.append(Phases(first - last, end - first, training))
    return found


def times(log: str, what: str) -> list[float]:
    """Return when a node logged something, in seconds."""
    stamps = [" ".join(line.split()[:2]) for line in log.splitlines() if what in line]
    return [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp() for stamp in stamps]


def on_flower(config: Config, folder: Path) -> tuple[dict[str, Any], list[Phases]]:
    """Run on a deployment, and return its result, and where the seconds of its rounds went."""
    flower_folder.write(folder / "app", config)
    deployment = Deployment(folder / "flower")
    try:
        deployment.superlink()
        for number in range(config.fleet.devices):
            deployment.supernode(number, "")
        deployment.run(folder / "app").wait()
        result: dict[str, Any] = json.loads((folder / "app-run/result.json").read_text())
        logs = [deployment.log(f"supernode-{number}") for number in range(config.fleet.devices)]
    finally:
        deployment.close()
    return result, phases(logs, folder / "app-run")


def main() -> None:
    """Measure both sides and print the ratio."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()
    rounds, devices = (2, 1) if options.smoke else (options.rounds, options.devices)
    config = make_config(devices, rounds, options.overrides)
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.perf_counter()
        local = here(config, folder / "here")
        between = time.perf_counter()
        remote, parts = on_flower(config, folder)
        end = time.perf_counter()
        times = seconds(folder / "here"), seconds(folder / "app-run")
    same = local["state_sha256"] == remote["state_sha256"]
    medians = [statistics.median(part) for part in times]
    print(f"same bits: {same}")
    for label, part, median in zip(("in-process", "Flower"), times, medians, strict=True):
        shown = ", ".join(f"{value:.2f}" for value in part)
        print(f"{label:<11} {median:8.2f} s per round (rounds 2 and later: {shown})")
    print(
        f"overhead    {medians[1] - medians[0]:8.2f} s per round, {medians[1] / medians[0]:.1f} x"
    )
    for phase in fields(Phases):
        median = statistics.median(getattr(each, phase.name) for each in parts)
        print(f"  {phase.name:<9} {median:8.2f} s")
    print(f"whole runs  {between - start:8.1f} s in-process, {end - between:.1f} s on Flower")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
