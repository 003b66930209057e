"""The workloads on sizewise, with up to 64 devices in one batched call.

python sizewise_together.py a|b|c [--workers N] [--rounds N]
"""

import sizewise_run

if __name__ == "__main__":
    sizewise_run.main(together=64)
