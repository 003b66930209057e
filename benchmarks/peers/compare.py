"""Run identical work on sizewise and its peers, and print what it took.

    python benchmarks/peers/compare.py [--workloads a b c] [--peers bare sizewise-1 ...]
        [--repeats N] [--rounds N] [--environments FOLDER | --here] [--json FILE] [--smoke]

Runs alternate, so that all meet the same machine. A ratio is printed only between runs that trained
as many clients for as many steps on as many samples and reached about the same accuracy.

Every peer has an environment of its own, which is made if need be. With `--here`, the bare loop and
sizewise run in this one, and the others are left out.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import environments
from memory_of_tree import Sampler

ACCURACY_MARGIN = 0.05
TIME_LIMIT = 1800


@dataclass(frozen=True)
class Peer:
    """An implementation with a number of processes that train."""

    title: str
    environment: str
    script: str
    workers: int


PEERS = {
    "bare": Peer("bare PyTorch loop", "bare", "bare.py", 1),
    "sizewise-1": Peer("sizewise, 1 worker", "sizewise", "sizewise_run.py", 1),
    "sizewise-2": Peer("sizewise, 2 workers", "sizewise", "sizewise_run.py", 2),
    "sizewise-together": Peer(
        "sizewise, 1 worker, together = 64", "sizewise", "sizewise_together.py", 1
    ),
    "sizewise-last": Peer(
        "sizewise, 1 worker, channels last", "sizewise", "sizewise_channels_last.py", 1
    ),
    "sizewise-last-2": Peer(
        "sizewise, 2 workers, channels last", "sizewise", "sizewise_channels_last.py", 2
    ),
    "flower": Peer("Flower simulation, 2 actors", "flower", "flower_run.py", 2),
    "pfl-1": Peer("pfl, 1 process", "pfl", "pfl_run.py", 1),
    "pfl-2": Peer("pfl, 2 processes", "pfl", "pfl_run.py", 2),
}

OURS = ("sizewise-1", "sizewise-2")


@dataclass(frozen=True)
class Run:
    """What one process tree reported, and the memory it was seen to hold."""

    rounds: list[float]
    first_round: float
    whole: float
    counts: tuple[int, int, int]
    loss: float
    accuracy: float
    peak_bytes: int


def run(peer: Peer, workload: str, rounds: int | None, folder: Path | None) -> Run:
    """Run a workload once on a peer, in its environment in a folder, or in this one."""
    python = sys.executable if folder is None else environments.python_of(peer.environment, folder)
    command = [str(python), str(environments.HERE / peer.script), workload]
    command += ["--workers", str(peer.workers)]
    command += [] if rounds is None else ["--rounds", str(rounds)]
    # The sizewise beside this file, whatever an environment may have installed.
    environment = {**os.environ, "PYTHONPATH": str(environments.ROOT / "src")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    with Sampler(process.pid) as sampler:
        try:
            output, errors = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            # By their numbers, one by one: only what this run started.
            for member in sampler.members:
                stop(member)
            raise
    if process.returncode != 0:
        raise SystemExit(f"{peer.title} failed on ({workload}):\n{errors[-4000:]}")
    facts = json.loads(output.strip().splitlines()[-1])
    counts = (facts["clients"], facts["steps"], facts["samples"])
    return Run(
        facts["rounds"],
        facts["first_round"],
        facts["whole"],
        counts,
        facts["loss"],
        facts["accuracy"],
        sampler.peak,
    )


def stop(process: int) -> None:
    """End a process, if it is still there."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


@dataclass(frozen=True)
class Summary:
    """The medians of a peer's runs of one workload."""

    round_seconds: float
    first_round: float
    whole: float
    counts: frozenset[tuple[int, int, int]]
    loss: float
    accuracy: float
    peak_bytes: float


def summarise(runs: list[Run]) -> Summary:
    """Return the medians; of rounds, over all but the first of all runs."""
    later = [seconds for one in runs for seconds in one.rounds[1:]]
    return Summary(
        statistics.median(later),
        statistics.median(one.first_round for one in runs),
        statistics.median(one.whole for one in runs),
        frozenset(one.counts for one in runs),
        statistics.median(one.loss for one in runs),
        statistics.median(one.accuracy for one in runs),
        statistics.median(one.peak_bytes for one in runs),
    )


def difference(one: Summary, other: Summary) -> str | None:
    """Return why two peers did not do the same work; None if they did."""
    if one.counts != other.counts or len(one.counts) != 1:
        return f"clients, steps, samples {sorted(one.counts)} against {sorted(other.counts)}"
    if abs(one.accuracy - other.accuracy) > ACCURACY_MARGIN:
        return f"accuracy {one.accuracy:.3f} against {other.accuracy:.3f}"
    return None


def table(found: dict[str, Summary]) -> str:
    """Return a workload's table as markdown, and below it why a ratio is missing."""
    base = [name for name in OURS if name in found]
    heads = ["", "s per round", *(f"over {PEERS[name].title}" for name in base)]
    heads += ["first round s", "whole s", "peak MB", "loss", "accuracy"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    refused = []
    for name, summary in found.items():
        cells = [PEERS[name].title, f"{summary.round_seconds:.4f}"]
        for ours in base:
            reason = difference(summary, found[ours])
            if reason is None:
                cells.append(f"{summary.round_seconds / found[ours].round_seconds:.2f}")
            else:
                cells.append("refused")
                refused.append(f"{PEERS[name].title} and {PEERS[ours].title}: {reason}")
        cells += [f"{summary.first_round:.1f}", f"{summary.whole:.1f}"]
        cells += [f"{summary.peak_bytes / 1e6:.0f}", f"{summary.loss:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{summary.accuracy:.3f}"]) + " |")
    return "\n".join([*lines, *(f"\nNot the same work: {reason}" for reason in refused)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["a", "b", "c"], choices=["a", "b", "c"])
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="at least 2; default: each workload's own")
    parser.add_argument("--environments", type=Path, default=environments.HERE / ".environments")
    parser.add_argument("--here", action="store_true", help="no environments: ours and bare only")
    parser.add_argument("--smoke", action="store_true", help="in seconds, to see that it runs")
    parser.add_argument("--json", type=Path, help="where to write every single run")
    given = parser.parse_args()
    if given.smoke:
        given.here, given.workloads, given.peers = True, ["c"], ["bare", "sizewise-1"]
        given.repeats, given.rounds = 1, 2
    if given.here:
        given.environments = None
        ours = ("bare", "sizewise")
        for name in [name for name in given.peers if PEERS[name].environment not in ours]:
            print(f"left out, as it has an environment of its own: {name}", file=sys.stderr)
            given.peers.remove(name)
    else:
        for name in given.peers:
            environments.python_of(PEERS[name].environment, given.environments)
    every: dict[str, dict[str, list[Run]]] = {}
    for workload in given.workloads:
        runs: dict[str, list[Run]] = {name: [] for name in given.peers}
        before = os.getloadavg()[0]
        for repeat in range(given.repeats):
            for name in given.peers:
                print(f"({workload}) {name}, {repeat + 1}", file=sys.stderr, flush=True)
                one = run(PEERS[name], workload, given.rounds, given.environments)
                runs[name].append(one)
        every[workload] = runs
        print(f"\n({workload}), {given.repeats} runs each; load average before {before:.1f}\n")
        print(table({name: summarise(found) for name, found in runs.items()}), flush=True)
        if given.json is not None:
            plain = {
                key: {name: [asdict(one) for one in found] for name, found in value.items()}
                for key, value in every.items()
            }
            given.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
