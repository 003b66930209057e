import subprocess
import sys

# In each step 38 MB are taken and given back, which are 9,300 pages. Without `keep_freed` the
# second step asks for nearly all of them again; later ones only at times, as glibc learns.
PROGRAM = """
import resource
import torch
from sizewise.common.heap import keep_freed

keep_freed()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(size) for size in range(50_000, 1_000_000, 50_000)]
    del tensors
    asked = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(asked)
"""


def test_freed_memory_is_used_again_without_asking_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 5000
