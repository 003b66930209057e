import subprocess
import sys

PROGRAM = """
import resource, sys
import torch
from sizewise.common.heap import keep_freed

if sys.argv[1] == "keep":
    keep_freed()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(size) for size in range(50_000, 1_000_000, 50_000)]
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[2:]))
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_freed_memory_is_used_again_without_asking_for_it() -> None:
    # 38 MB in each of four steps are 37,000 pages.
    assert faults("keep") < 1000 < faults("ask again")
