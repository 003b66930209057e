"""The workloads on sizewise, with up to 64 devices in one batched call; as `sizewise_run.py`."""

import sizewise_run

if __name__ == "__main__":
    sizewise_run.main(together=64)
