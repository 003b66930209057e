"""What a fleet of real nodes takes: bytes of a node, of a container around it, of their server.

    python benchmarks/fleet.py memory|container|box|upload [--rounds N] [--smoke]

The first three start a SuperLink and nodes on loopback, as processes of their own. `memory` looks
at the bytes of a node and of all that it forks every 20 ms (PSS). `container` puts the node into a
cgroup of just what it says it needs, and then into one of half of that; it has to be root for it.
`box` has many nodes in one process, of which 30 % die or are late in every round. `upload` compares
ways to send updates in fewer bytes; it runs in this process, since all engines send the same.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
from sizewise import config as configs
from sizewise.common.structure import parse_bytes
from sizewise.config import Config
from sizewise.flower import folder as flower_folder
from sizewise.flower import usage
from sizewise.runs import session

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/flower"))
from deployment import Deployment, descendants, memory_group

WORK = {
    "20MB": ("preresnet20", "digits", 10),
    "60MB": ("densenet22", "digits", 16),
    "80MB": ("cnn", "digits", 100),
    "130MB": ("vit_tiny", "digits", 8),
    "200MB": ("resnet18", "digits", 16),
}
"""By budget: a model that nearly fills it, its data, its batch."""

CONTAINED = {
    "20MB": ("preresnet20", "digits", 10),
    "60MB": ("preresnet20", "digits", 32),
    "200MB": ("preresnet20", "digits", 100),
}
"""Likewise, of a model whose messages are small beside its budget."""

Work = Mapping[str, tuple[str, str, int]]


def make_config(work: Work, budget: str, rounds: int) -> Config:
    """Return FedAvg on one device of a budget, with little data: bytes are asked for, not time."""
    model, data, batch = work[budget]
    values = [f"rounds={rounds}", f"model.name={model}", f"data.name={data}", "engine.workers=1"]
    values += [f"recipe.batch={batch}", "recipe.epochs=1", "method.name=fedavg"]
    values += ["fleet.devices=1", "fleet.per_round=1", "data.train_limit=200"]
    values += ["data.image_size=32"]
    return configs.load(None, [*values, "data.test_limit=100", f'fleet.budgets=["{budget}"]'])


@contextmanager
def deployed(config: Config) -> Iterator[tuple[Path, Deployment]]:
    """Yield a folder with the app of a config, and a SuperLink."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flower_folder.write(folder / "app", config)
        deployment = Deployment(folder / "flower")
        try:
            deployment.superlink()
            yield folder, deployment
        finally:
            deployment.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return what became of each device of each round."""
    text = (folder / "app-run/updates.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def taken(process: int) -> int:
    """Return the bytes of a process and of all that it started."""
    return sum(usage.process_bytes(each) or 0 for each in (process, *descendants(process)))


def memory(rounds: int, budgets: list[str]) -> None:
    """Print what nodes take while they wait and while they train."""
    print(
        common.head("budget", "model", "predicted MB", "waits in", "trains in", "at most, allowed")
    )
    for budget in budgets:
        with deployed(make_config(WORK, budget, rounds)) as (folder, deployment):
            node = deployment.supernode(0, f"memory='{budget}'")
            time.sleep(2)
            waiting, peak = taken(node.pid), 0
            run = deployment.run(folder / "app")
            while run.poll() is None:
                peak = max(peak, taken(node.pid))
                time.sleep(0.02)
            predicted = max(line["predicted"] for line in lines(folder))
            allowed = 1.1 * (250e6 + predicted)
        figures = (predicted, waiting, peak, allowed)
        shown = " | ".join(f"{figure / 1e6:.0f}" for figure in figures)
        print(f"| {budget} | {WORK[budget][0]}, batch {WORK[budget][2]} | {shown} |", flush=True)


def container(rounds: int, budgets: list[str]) -> None:
    """Print what becomes of nodes in containers of just their size, and of half of it."""
    print(common.head("budget", "container MB", "rounds", "refused", "killed", "in half of it"))
    for budget in budgets:
        limit = usage.BASE + usage.RESERVE + parse_bytes(budget, "budget")
        with (
            deployed(make_config(CONTAINED, budget, rounds)) as (folder, deployment),
            memory_group(limit) as group,
        ):
            try:
                deployment.supernode(0, f"memory='{budget}'", group=group)
                deployment.run(folder / "app").wait()
                done = lines(folder)
                killed = deployment.log("supernode-0").count("signal")
            finally:
                deployment.close()
        with memory_group(limit // 2) as group:
            command = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m sizewise flower"
            command += f" node --insecure --node-config \"partition-id=0 memory='{budget}'\""
            half = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
        refused = sum(line["refused"] is not None for line in done)
        print(
            f"| {budget} | {limit / 1e6:.0f} | {len(done)} | {refused} | {killed} "
            f"| exit {half.returncode}: {half.stderr.strip():.90} |",
            flush=True,
        )


def box(rounds: int, sizes: list[int]) -> None:
    """Print what rounds of many nodes take, and what became of their devices."""
    names = ("nodes", "rounds", "seconds per round", "merged", "dead", "late or lost", "other")
    print(common.head(*names, "accuracy", "SuperLink MB", "ServerApp MB", "all accounted for"))
    for count in sizes:
        values = [f"rounds={rounds}", "model.name=mlp", "engine.workers=1", "method.name=fedavg"]
        values += [f"fleet.devices={count}", f"fleet.per_round={count}", "recipe.epochs=2"]
        values += ["recipe.lr=0.1", f"engine.flower.enough={count * 6 // 10}"]
        values += ["engine.flower.deadline=120", f"engine.flower.nodes={count * 9 // 10}"]
        with deployed(configs.load(None, values)) as (folder, deployment):
            deployment.start(
                "box",
                *(sys.executable, "-m", "sizewise", "flower", "box", "--insecure"),
                *("--superlink", deployment.address, "--devices", f"0-{count - 1}"),
                *("--faults", f"die=0.15 late=0.15 seconds={0.3 * count} seed=1"),
            )
            run, peaks = deployment.run(folder / "app"), {"superlink": 0, "serverapp": 0}
            link = deployment.processes[0].pid
            while run.poll() is None:
                for each in (link, *descendants(link)):
                    part = "serverapp" if "serverapp" in command_of(each) else "superlink"
                    alone = part == "serverapp" or each == link
                    taken_now = (usage.process_bytes(each) or 0) * alone
                    peaks[part] = max(peaks[part], taken_now)
                time.sleep(0.5)
            done = lines(folder)
            history = (folder / "app-run/history.jsonl").read_text().splitlines()
        seconds = statistics.median(json.loads(line)["seconds"] for line in history[1:])
        accuracies = [json.loads(line)["accuracy"] for line in history]
        asked = {(line["round"], line["device"]) for line in done}
        whole = asked == {(n + 1, d) for n in range(rounds) for d in range(count)}
        reasons = Counter(kind_of(line["refused"]) for line in done)
        told = " | ".join(str(reasons[kind]) for kind in ("merged", "dead", "late", "other"))
        print(
            f"| {count} | {len(history)} | {seconds:.1f} | {told} "
            f"| {accuracies[0]:.1%} to {accuracies[-1]:.1%} | {peaks['superlink'] / 1e6:.0f} "
            f"| {peaks['serverapp'] / 1e6:.0f} | {whole and len(asked) == len(done)} |",
            flush=True,
        )


def upload(rounds: int, data: list[str]) -> None:
    """Print what updates in fewer bytes save, and what they cost in accuracy."""
    print(common.head("upload", "MB up", "of full", "accuracy"))
    full = 0
    for kind in ("full", "bf16", "int8", "topk"):
        values = [f"rounds={rounds}", "method.name=fedavg", f"recipe.upload={kind}", *data]
        values += ["fleet.devices=20", "fleet.per_round=5", "fleet.budgets=[]", "recipe.lr=0.05"]
        with tempfile.TemporaryDirectory() as name:
            config = configs.load(None, values)
            with session.started(config, Path(name) / "run") as federation:
                result = federation.run()
        full = full or result["bytes_up"]
        print(
            f"| {kind} | {result['bytes_up'] / 1e6:.2f} | {result['bytes_up'] / full:.1%} "
            f"| {result['accuracy']:.1%} |",
            flush=True,
        )


def command_of(process: int) -> str:
    """Return the command line of a process, "" if it ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def kind_of(reason: str | None) -> str:
    """Return what a reason to refuse amounts to."""
    if reason is None:
        return "merged"
    if "left" in reason or "no node" in reason:
        return "dead"
    return "late" if "answer" in reason or "enough" in reason else "other"


def main() -> None:
    """Measure one of them."""
    parser = common.parser(__doc__)
    parser.add_argument("what", choices=["memory", "container", "box", "upload"])
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    most = 1 if options.smoke else None
    if options.what == "memory":
        memory(options.rounds or 2, list(WORK)[:most])
    elif options.what == "upload":
        small = ["model.name=linear", "data.train_limit=200", "data.test_limit=50"]
        mini = ["model.name=preresnet8", "data.name=cifar10", "data.image_size=16"]
        mini += ["data.train_limit=6000", "data.test_limit=2000", "engine.workers=1"]
        upload(options.rounds or (1 if options.smoke else 40), small if options.smoke else mini)
    elif options.what == "box":
        box(
            options.rounds or (2 if options.smoke else 20), [8] if options.smoke else [200, 50, 100]
        )
    else:
        container(options.rounds or (1 if options.smoke else 20), list(CONTAINED)[:most])


if __name__ == "__main__":
    main()
