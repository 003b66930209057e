"""The server's memory does not grow with the number of updates in a round."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import re, sys, tempfile
from pathlib import Path
from sizewise import config, session

per_round, workers = map(int, sys.argv[1:])
tables = {
    "rounds": 2,
    # 30 kB an update: a thousand of them, if anything kept them, would be a tenth of the process.
    "model": {"name": "mlp", "args": {"hidden": [100]}},
    "data": {"partition": "draw", "samples_per_device": 8},
    "fleet": {"devices": 2000, "per_round": per_round},
    "recipe": {"batch": 8},
    "engine": {"workers": workers},
}
with tempfile.TemporaryDirectory() as folder:
    with session.started(config.from_dict(tables), Path(folder, "run")) as federation:
        assert len((federation.run())["refused"]) == 0
# Not getrusage: its figure starts from that of whoever started this process.
print(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""


def peak(per_round: int, workers: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(per_round), str(workers)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_thousand_updates_take_as_much_as_ten(workers: int) -> None:
    few, many = peak(10, workers), peak(1000, workers)
    print(f"{workers} workers: {few:,} and {many:,} kB; ratio {many / few:.4f}")
    assert many / few < 1.05
