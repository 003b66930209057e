"""Predicted bytes of a training step against the bytes that the allocator really hands out.

For every case the step is predicted with `sizewise.memory.predict`; then it is run for real in a
fresh process, once under a heap counter that is preloaded below torch (`heap.c`), and once under
our own `Meter`. Prediction and meter must agree to the byte; the heap is compared with the
prediction plus the documented allowance for what is no tensor.

    python benchmarks/memory.py            # all cases, about five minutes, writes memory.md
    python benchmarks/memory.py vit bert   # some of them, prints only
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from sizewise import models
from sizewise.anatomy import Staged
from sizewise.memory import Meter, predict
from sizewise.step import training_step

HERE = Path(__file__).parent
MB = 10**6
DOMINATED = 30 * MB
"""Below this peak the allowance is a large part of the figure, so errors are only reported."""

OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.01),
    "momentum": partial(SGD, lr=0.01, momentum=0.9, weight_decay=5e-4),
    "adam": partial(Adam, lr=1e-3),
}


@dataclass(frozen=True)
class Case:
    """One training step: a model at a width, with a frozen share of its blocks."""

    model: str
    batch: int
    width: float = 1.0
    frozen: float = 0.0
    optimizer: str = "momentum"


CASES = [
    Case("preresnet20", 8),
    Case("preresnet20", 32),
    Case("preresnet20", 128),
    Case("preresnet20", 64, optimizer="adam"),
    Case("preresnet20", 128, frozen=1 / 3),
    Case("preresnet20", 128, frozen=2 / 3),
    Case("preresnet20", 128, width=0.5),
    Case("preresnet20", 128, width=0.25),
    Case("resnet18", 8),
    Case("resnet18", 128),
    Case("resnet18", 32, optimizer="adam"),
    Case("resnet18", 32, frozen=0.5),
    Case("resnet18", 64, width=0.5),
    Case("resnet18", 128, width=0.25, optimizer="adam"),
    Case("densenet40", 8),
    Case("densenet40", 32),
    Case("densenet40", 16, optimizer="adam"),
    Case("densenet40", 32, frozen=0.5),
    Case("densenet40", 32, width=0.5),
    Case("densenet40", 64, width=0.25),
    Case("vit_tiny", 8),
    Case("vit_tiny", 32, optimizer="adam"),
    Case("vit_tiny", 32, frozen=2 / 3),
    Case("vit_tiny", 32, width=0.5),
    Case("vit_tiny", 64, width=0.25, optimizer="sgd"),
    Case("bert", 8),
    Case("bert", 16, optimizer="adam"),
    Case("bert", 16, frozen=0.5, optimizer="adam"),
    Case("bert", 16, width=0.5, optimizer="adam"),
    Case("bert", 32, width=0.25),
]


class Embedding(nn.Module):
    """Token and position embeddings, normalised."""

    def __init__(self, vocabulary: int, length: int, dim: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.zeros(length, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map token numbers (batch, length) to (batch, length, dim)."""
        return self.norm(self.token(x) + self.position)


class FirstToken(nn.Module):
    """Classifies a text by its first token."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, length, dim) to logits (batch, classes)."""
        return self.linear(x[:, 0])


def bert(width: float) -> Staged:
    """Return an encoder like a small BERT: 4 layers of 256 dimensions, 8000 words, 128 tokens."""
    dim = int(256 * width)
    return Staged(
        Embedding(8000, 128, dim),
        (nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True) for _ in range(4)),
        FirstToken(dim, 10),
    )


def build(case: Case) -> tuple[nn.Module, Tensor, tuple[str, ...] | None]:
    """Return a case's model, its batch, and the prefixes of what learns."""
    if case.model == "bert":
        model: nn.Module = bert(case.width)
        inputs = torch.zeros(case.batch, 128, dtype=torch.int64)
    else:
        model = models.build(case.model, classes=10, image=(3, 32, 32), width=case.width)
        inputs = torch.zeros(case.batch, 3, 32, 32)
    if not case.frozen:
        return model, inputs, None
    blocks = len(model.blocks)
    first = round(case.frozen * blocks)
    return model, inputs, (*(f"blocks.{i}" for i in range(first, blocks)), "head")


def prepare(case: Case) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    """Return all that a real step needs."""
    model, inputs, trainable = build(case)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable is None or name.startswith(trainable))
    learning = [p for p in model.parameters() if p.requires_grad]
    labels = torch.zeros(case.batch, dtype=torch.int64)
    return model, OPTIMIZERS[case.optimizer](learning), inputs, labels


def measure(case: Case) -> dict[str, int]:
    """Run two steps under the heap counter and two under the meter; called in a fresh process."""
    torch.set_num_threads(1)
    heap = ctypes.CDLL(None)
    heap.heap_live.restype = heap.heap_peak.restype = ctypes.c_long
    # A first tiny step loads the parts of torch that load lazily: they are no part of ours.
    small = nn.Linear(2, 2)
    training_step(small, SGD(small.parameters()), torch.zeros(1, 2), torch.zeros(1).long())
    before = heap.heap_live()
    heap.heap_reset_peak()
    job = prepare(case)
    for _ in range(2):
        training_step(*job)
    peak = heap.heap_peak() - before
    job = prepare(case)
    with Meter() as meter:
        meter.track(*job)
        for _ in range(2):
            training_step(*job)
    return {"heap": peak, "metered": meter.peak}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Case(**json.loads(sys.argv[2])))))
        sys.exit()
    lib = "/tmp/exp/heap.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", lib, str(HERE / "heap.c")], check=True)
    for case in CASES:
        if sys.argv[1:] and case.model not in sys.argv[1:]:
            continue
        model, inputs, trainable = build(case)
        f = predict(model, inputs, optimizer=OPTIMIZERS[case.optimizer], trainable=trainable)
        r = subprocess.run(
            [sys.executable, __file__, "--measure", json.dumps(asdict(case))],
            env=os.environ | {"LD_PRELOAD": lib},
            capture_output=True,
            text=True,
            check=True,
        )
        d = json.loads(r.stdout.splitlines()[-1])
        print(
            case,
            f"pred {f.peak / MB:.2f} equal {f.peak == d['metered']} heap {d['heap'] / MB:.2f} diff {(d['heap'] - f.peak) / MB:.2f} = {(d['heap'] - f.peak) / d['heap'] * 100:.1f}%",
            f"modules {sum(1 for m in model.modules() if not list(m.children()))} convs {sum(isinstance(m, nn.Conv2d) for m in model.modules())}",
            flush=True,
        )
