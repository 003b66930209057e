"""Seconds from the command line to the first round of the default config, imports included.

    python benchmarks/startup.py [--repeats N] [--set KEY=VALUE]...

A round begins when the run has been announced on stderr, with the data loaded, every device class
planned and the workers there; how long it takes is in the run's history. Beside it, in the same
sitting, what a process needs to import torch and nothing else: no start can be shorter.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 3.0
SIZEWISE = Path(sys.executable).with_name("sizewise")


def start(overrides: list[str]) -> tuple[float, float]:
    """Run one round; return when it began and when it ended, in seconds since the start."""
    options = [part for value in ("rounds=1", *overrides) for part in ("--set", value)]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "run"
        begin = time.perf_counter()
        process = subprocess.Popen(
            [SIZEWISE, "run", *options, "--out", out],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        messages = process.stderr or sys.exit("a process without stderr")
        messages.readline()
        began = time.perf_counter() - begin
        rest = messages.read()
        if process.wait() != 0:
            sys.exit(rest)
        lasted: float = json.loads((out / "history.jsonl").read_text())["seconds"]
    return began, began + lasted


def import_torch() -> float:
    """Return what it takes to start Python and import torch."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, and print medians and the best of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--smoke", action="store_true", help="once, and not judged")
    options = parser.parse_args()
    found: dict[str, list[float]] = {"import torch": [], "first round begins": [], "ends": []}
    for _ in range(1 if options.smoke else options.repeats):
        began, ended = start(options.overrides)
        for column, value in zip(found.values(), (import_torch(), began, ended), strict=True):
            column.append(value)
    for label, values in found.items():
        print(f"{label:<19} median {statistics.median(values):5.2f} s, best {min(values):5.2f} s")
    met = statistics.median(found["first round begins"]) < LIMIT
    sys.exit(0 if met or options.smoke else 1)


if __name__ == "__main__":
    main()
