"""The workloads on pfl (Apple's private federated learning), with its simulated backend.

    python pfl_run.py a|b|c [--workers N] [--rounds N]

More than one process is pfl's own way with `torchrun`: each trains its part of a cohort, and they
sum their updates with gloo.
"""

import os
import sys

import work


def main() -> None:
    """Run one workload, in as many processes as were asked for."""
    given = work.arguments("pfl")
    if given.workers > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ[work.STARTED] = str(work.started())
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={given.workers}"]
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])  # noqa: S606
    # Only now: pfl joins the other processes when it is imported.
    import pfl_training

    pfl_training.train(given)


if __name__ == "__main__":
    main()
