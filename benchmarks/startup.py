"""Seconds from the command line to the first round of the default config, imports included.

    python benchmarks/startup.py [METHOD]... [--repeats N] [--against SRC] [--set KEY=VALUE]...

One row for each method. A round begins when the run has been announced on stderr, with the data
loaded, every device class planned and the workers there; how long it takes is in the run's history.
Right before each, what a process needs to import torch and nothing else, and the ratio to that: no
start can be much shorter. With `--against`, the same for another copy of the library, such as an
older commit's `src`. All take turns, so that they meet the same machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import sizewise
from sizewise.runs import catalogue

LIMIT = 4.0
HERE = str(Path(sizewise.__file__).parents[1])
RUN = [sys.executable, "-c", "from sizewise.cli import main; main()", "run"]


def start(source: str, overrides: list[str]) -> tuple[float, float]:
    """Run one round; return when it began and when it ended, in seconds since the start."""
    options = [part for value in ("rounds=1", *overrides) for part in ("--set", value)]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "run"
        begin = time.perf_counter()
        process = subprocess.Popen(
            [*RUN, *options, "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )
        messages = process.stderr or sys.exit("a process without stderr")
        announced = messages.readline()
        began = time.perf_counter() - begin
        rest = messages.read()
        if process.wait() != 0:
            sys.exit(announced + rest)
        lasted: float = json.loads((out / "history.jsonl").read_text())["seconds"]
    return began, began + lasted


def import_torch() -> float:
    """Return what it takes to start Python and import torch."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, and print the medians; the exit code is 1 if a method begins too late."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("methods", nargs="*", default=list(catalogue.names("methods")))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", metavar="SRC", help="another copy's `src`")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--smoke", action="store_true", help="one method once, and not judged")
    options = parser.parse_args()
    if options.smoke:
        options.methods, options.repeats = ["fedavg"], 1
    sources = {"": HERE} | ({"before ": options.against} if options.against else {})
    torch: list[float] = []
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for _ in range(options.repeats):
        for method in options.methods:
            for label, source in sources.items():
                torch.append(import_torch())
                began, ended = start(source, [f"method.name={method}", *options.overrides])
                found[method, label].append((began, began / torch[-1], ended))
    print(f"import torch: median {statistics.median(torch):.2f} s, best {min(torch):.2f} s")
    columns = [f"{label}{what}" for label in sources for what in ("begins", "of torch", "ends")]
    print(f"{'seconds':<12}", *(f"{column:>15}" for column in columns))
    late = False
    for method in options.methods:
        values: list[str] = []
        for label in sources:
            began, ratio, ended = map(statistics.median, zip(*found[method, label], strict=True))
            values += [f"{began:.2f}", f"x {ratio:.2f}", f"{ended:.2f}"]
            late |= not label and began > LIMIT
        print(f"{method:<12}", *(f"{value:>15}" for value in values))
    sys.exit(late and not options.smoke)


if __name__ == "__main__":
    main()
