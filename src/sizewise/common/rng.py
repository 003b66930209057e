"""Random generators derived from what they are for.

Every random choice in a run asks for its own generator, named by (seed, purpose, round, device).
Nothing depends on the order in which choices are made or on the process that makes them, so a run
gives the same bits for any number of workers, and a resumed run has no random state to restore.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed that is a pure function of the run's seed and the purpose."""
    text = "/".join([str(seed), *map(str, purpose)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *purpose))


def python_generator(seed: int, *purpose: str | int) -> random.Random:
    """Return a standard-library generator for one purpose; it samples huge ranges in O(sample)."""
    return random.Random(derive(seed, *purpose))  # noqa: S311  (a simulation, not a secret)


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Run a block with torch's global generators seeded for one purpose, then put them back.

    For code that offers no generator argument: weight initialisation and dropout.
    """
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    # torch.manual_seed would note a stack trace for every GPU that is not in use, each time.
    if module is not None and not getattr(module, "is_initialized", lambda: True)():
        module = None
    several = hasattr(module, "manual_seed_all")  # Apple's has one generator, and cannot fork it.
    with torch.random.fork_rng(devices=range(torch.accelerator.device_count()) if several else ()):
        torch.default_generator.manual_seed(derive(seed, *purpose))
        if module is not None:
            (module.manual_seed_all if several else module.manual_seed)(derive(seed, *purpose))
        yield
