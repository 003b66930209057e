"""A million devices on sizewise: what a round costs as the fleet grows, and as more are asked.

    python benchmarks/peers/scale.py [--rounds N] [--workers N] [--smoke]

The tiny MLP, one local step on 20 samples. Devices draw their samples from one set when they are
asked for (`data.partition = "draw"`), so a fleet is a description and not a list. Each line is a
process of its own. With two workers or more, the main process is the server alone, and its memory
is that of the server; with one, the server trains as well.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import sizewise_run
import work
from memory_of_tree import Sampler
from sizewise import config as configs
from sizewise.runs import session

FLEETS = ((10_000, 1000), (100_000, 1000), (1_000_000, 1000))
COHORTS = ((1_000_000, 10), (1_000_000, 100), (1_000_000, 1000))
SAMPLES = 20


def measured(devices: int, per_round: int, rounds: int, workers: int) -> None:
    """Run one federation in this process and print the times of its rounds."""
    # As many samples as in workload (c), for a fleet of any size.
    workload = replace(work.WORKLOADS["c"], rounds=rounds, per_round=per_round)
    tables = sizewise_run.make_config(workload, workers).to_dict()
    tables["data"] |= {"partition": "draw", "samples_per_device": SAMPLES}
    tables["fleet"] |= {"devices": devices}
    config = configs.from_dict(tables)
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = sizewise_run.make_dataset(workload)
        with session.started(config, Path(folder) / "run", dataset) as federation:
            began = work.since_start()
            federation.run(lambda line, totals: marks.append(work.since_start()))
    ends = [began, *marks]
    times = [end - start for start, end in itertools.pairwise(ends)]
    print(json.dumps({"began": began, "rounds": times}))


def line(devices: int, per_round: int, rounds: int, workers: int) -> str:
    """Run one federation in a process of its own and return its line of the table."""
    command = [sys.executable, __file__, "--measure", str(devices), str(per_round)]
    command += ["--rounds", str(rounds), "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with Sampler(process.pid, interval=0.1) as sampler:
        output, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the run of {devices} devices failed")
    facts = json.loads(output)
    seconds = statistics.median(facts["rounds"][1:])
    return (
        f"| {devices:,} | {per_round:,} | {facts['began']:.1f} | {seconds:.3f} | {1 / seconds:.2f} "
        f"| {sampler.root_peak / 1e6:.0f} | {sampler.peak / 1e6:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--measure", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="in seconds, to see that it runs")
    given = parser.parse_args()
    rounds, workers, cases = given.rounds, given.workers, [*FLEETS, *COHORTS]
    if given.measure:
        devices, per_round = given.measure
        measured(devices, per_round, rounds, workers)
        return
    if given.smoke:
        rounds, workers, cases = 2, 1, [(1000, 10)]
    print("| devices | a round | start s | s per round | rounds/s | main MB | tree MB |")
    print("|---|---|---|---|---|---|---|")
    for devices, per_round in dict.fromkeys(cases):
        print(line(devices, per_round, rounds, workers), flush=True)


if __name__ == "__main__":
    main()
