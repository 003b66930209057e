"""The workloads on sizewise, with images channels last; as `sizewise_run.py`."""

import sizewise_run

if __name__ == "__main__":
    sizewise_run.main(layout="channels_last")
