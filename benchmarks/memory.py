"""Predicted bytes of a training step against the bytes that the allocator really hands out.

For every case the step is predicted with `sizewise.memory.predict`; then it is run for real in a
fresh process, once under a heap counter that is preloaded below torch (`heap.c`), and once under
our own `Meter`. Predicted peak and meter must agree to the byte; the heap is compared with the
predicted bytes of the whole process.

    python benchmarks/memory.py            # all cases, about ten minutes
    python benchmarks/memory.py vit bert   # some of them; --smoke: one, in seconds
    python benchmarks/memory.py --write    # all, and memory.md is made anew
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import common
from sizewise import models
from sizewise.memory.prediction import Meter, OptimizerFactory, predict
from sizewise.steps.optimizers import Optimizer
from sizewise.steps.step import rest, training_step
from sizewise.surgery.anatomy import Staged, anatomy

HERE = Path(__file__).parent
MB = 10**6
DOMINATED = 30 * MB
"""Below this, what is no tensor is a large part of the figure, so errors are only reported."""

SETTINGS = {"MKL_DISABLE_FAST_MM": "1"}

OPTIMIZERS: dict[str, OptimizerFactory] = {
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
    Case("densenet40", 4),
    Case("densenet22", 12, optimizer="adam"),
    Case("densenet40", 24, width=0.5, frozen=2 / 3),
    Case("preresnet20", 20),
    Case("preresnet20", 112, frozen=8 / 9),
    Case("preresnet44", 12, width=0.5, optimizer="adam"),
    Case("resnet44", 10),
    Case("resnet18", 24, width=0.25),
    Case("resnet18", 64, frozen=0.75, optimizer="adam"),
    Case("resnet34", 40, width=0.25, frozen=0.5),
    Case("vit", 40, width=0.5),
    Case("vit", 20, optimizer="sgd"),
    Case("vit_tiny", 12, frozen=0.75),
    Case("cnn", 48, optimizer="adam"),
    Case("bert", 6, width=0.5),
    Case("bert", 20, width=0.25, frozen=0.5, optimizer="adam"),
]

# Written down after every constant of the estimate was fixed and before any of them was measured.
# The cases above were known when it was designed, so these are the fair ones.
UNSEEN = [
    Case("densenet40", 20, width=0.75, optimizer="adam"),
    Case("preresnet32", 48),
    Case("preresnet56", 24, frozen=0.5),
    Case("resnet56", 40, width=0.5),
    Case("resnet34", 16),
    Case("resnet34", 96, width=0.5, optimizer="adam"),
    Case("vit", 24, width=0.75),
    Case("vit", 96, frozen=0.5, optimizer="adam"),
    Case("vit_tiny", 16, width=0.25, optimizer="adam"),
    Case("vit_tiny", 20, width=0.75, optimizer="sgd"),
    Case("cnn", 96),
    Case("bert", 4, width=0.75),
    Case("bert", 24, width=0.5, frozen=0.5),
]

# Other kinds of layers, and 1x1 and 2x2 maps. Their rules were made from single kernels.
OTHERS = [
    Case("lstm", 16),
    Case("lstm", 64, optimizer="adam"),
    Case("lstm", 32, width=0.5),
    Case("lstm", 8, width=2, optimizer="sgd"),
    Case("conv3d", 4),
    Case("conv3d", 16, optimizer="adam"),
    Case("conv3d", 8, width=2),
    Case("conv3d", 32, width=0.5, optimizer="sgd"),
    Case("resnet18, 16x16", 8),
    Case("resnet18, 16x16", 64, optimizer="adam"),
    Case("resnet18, 8x8", 32),
    Case("resnet34, 16x16", 32, frozen=0.5),
    Case("resnet18, bfloat16", 8),
    Case("resnet18, bfloat16", 64, optimizer="adam"),
    Case("preresnet20, bfloat16", 64),
    Case("densenet40, bfloat16", 16),
    Case("bert, bfloat16", 16, optimizer="adam"),
]


class Recurrent(nn.Module):
    """Two LSTM layers over 100 steps of 64 numbers, 256 units at full width."""

    def __init__(self, width: float) -> None:
        super().__init__()
        units = int(256 * width)
        self.layers = nn.LSTM(64, units, num_layers=2, batch_first=True)
        self.head = nn.Linear(units, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 100, 64) to logits (batch, 10)."""
        out: Tensor = self.head(self.layers(x)[0][:, -1])
        return out


class Autocast(nn.Module):
    """A model whose forward pass is in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch to logits (batch, classes)."""
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.model(x)
        return out.float()


def volumes(width: float) -> nn.Sequential:
    """Return a chain of 3-D convolutions, 16 to 128 channels, for volumes of 16x16x16."""
    channels = [1, *(int(width * count) for count in (16, 32, 64, 128))]
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv3d(before, after, 3, padding=1), nn.BatchNorm3d(after), nn.ReLU()]
        layers += [nn.Conv3d(after, after, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1], 10))


class Embedding(nn.Module):
    """Token and position embeddings, normalised."""

    def __init__(self, vocabulary: int, length: int, dim: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.zeros(length, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map token numbers (batch, length) to (batch, length, dim)."""
        out: Tensor = self.norm(self.token(x) + self.position)
        return out


class FirstToken(nn.Module):
    """Classifies a text by its first token."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, length, dim) to logits (batch, classes)."""
        out: Tensor = self.linear(x[:, 0])
        return out


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
    name, _, variant = case.model.partition(", ")
    side = int(variant.partition("x")[0]) if "x" in variant else 32
    if name == "bert":
        model: nn.Module = bert(case.width)
        inputs = torch.zeros(case.batch, 128, dtype=torch.int64)
    elif name == "lstm":
        model, inputs = Recurrent(case.width), torch.zeros(case.batch, 100, 64)
    elif name == "conv3d":
        model, inputs = volumes(case.width), torch.zeros(case.batch, 1, 16, 16, 16)
    else:
        model = models.build(name, classes=10, image=(3, side, side), width=case.width)
        inputs = torch.zeros(case.batch, 3, side, side)
    if variant == "bfloat16":
        model = Autocast(model)
    if not case.frozen:
        return model, inputs, None
    blocks = len(anatomy(model).blocks)
    first = round(case.frozen * blocks)
    return model, inputs, (*(f"blocks.{i}" for i in range(first, blocks)), "head")


def prepare(case: Case) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    """Return all that a real step needs."""
    model, inputs, trainable = build(case)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable is None or name.startswith(trainable))
    rest(model)  # As training does, and the prediction.
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


@dataclass(frozen=True)
class Result:
    """What was predicted and what was measured for a case, in bytes."""

    case: Case
    predicted: int
    process: int
    metered: int
    heap: int

    @property
    def error(self) -> float:
        """The process's predicted bytes against the heap; negative is an underestimate."""
        return self.process / self.heap - 1

    @property
    def row(self) -> str:
        """One line of the table."""
        case, dominated = self.case, self.heap <= DOMINATED
        trained = f"last {1 - case.frozen:.0%} of blocks" if case.frozen else "all"
        return (
            f"| {case.model} | {case.width:g} | {trained} | {case.optimizer} | {case.batch} "
            f"| {self.predicted:,} | {self.metered:,} | {self.process:,} | {self.heap:,} "
            f"| {self.error:+.1%}{' (not judged)' if dominated else ''} |"
        )


def run(case: Case, counter: Path) -> Result:
    """Predict a case here and measure it in a fresh process."""
    model, inputs, trainable = build(case)
    optimizer = OPTIMIZERS[case.optimizer]
    footprint = predict(model, inputs, optimizer=optimizer, trainable=trainable)
    if footprint.process is None:
        sys.exit(f"the process is not known for {footprint.not_known_for}")
    environment = {**os.environ, "LD_PRELOAD": str(counter), **SETTINGS}
    command = [sys.executable, __file__, "--measure", json.dumps(asdict(case))]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode:
        sys.exit(f"{case} could not be measured:\n{child.stderr}")
    result = Result(case, footprint.peak, footprint.process, **json.loads(child.stdout))
    print(result.row, flush=True)
    return result


def report(title: str, results: list[Result]) -> tuple[str, bool]:
    """Return a table with its conclusion, and whether all goals are met."""
    judged = [result.error for result in results if result.heap > DOMINATED]
    exact = sum(result.predicted == result.metered for result in results)
    median, worst = statistics.median(map(abs, judged)), max(map(abs, judged))
    lowest = min(0.0, *judged)
    met = exact == len(results) and median <= 0.03 and worst <= 0.10 and lowest >= -0.05
    lines = [
        f"## {title}",
        "",
        "| model | width | trained | optimiser | batch | peak | metered | process | heap | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(result.row for result in results),
        "",
        f"- The predicted peak equals the metered one in {exact} of {len(results)} cases.",
        f"- Process against heap, {len(judged)} cases above {DOMINATED // MB} MB: median error "
        f"{median:.1%} (goal: 3 %), worst {worst:.1%} (goal: 10 %), largest underestimate "
        f"{-lowest:.1%} (goal: 5 %).",
        f"- The goals are {'met' if met else 'MISSED'}.",
        "",
    ]
    return "\n".join(lines), met


INTRODUCTION = f"""# Bytes of a training step: predicted, metered, and handed out by the allocator

**Asked:** does the predicted peak of a step equal the metered one, and does the predicted size of a
process hold against what malloc hands out? `python benchmarks/memory.py`, one thread,
torch {torch.__version__}. All in bytes.

- *peak*: the tensor bytes that `memory.predict` gives without running the step.
- *metered*: the tensor bytes that `memory.Meter` reads while the step runs twice for real.
- *process*: the predicted bytes of a CPU process: tensors, kernel scratch, compiled kernels.
- *heap*: the most that malloc handed out while the model was built and two steps ran in a fresh
  process, over what was in use before (after one tiny step, which loads torch's lazy parts).
- *error*: process against heap; negative is an underestimate.

**Rules.** Scratch space and compiled kernels were measured one kernel at a time. MKL packs the
factors of a matrix product only when the result has 192 columns or more, and as many rows or a
transposed factor. When a bfloat16 convolution goes backward its weights are there twice, and of
each product of bfloat16 oneDNN keeps a kernel of 0.57 MB.

**Known and unseen.** The 46 known cases were seen while the rules were made. The unseen ones were
written down when all rules were fixed, and measured once. Earlier rules met the goals on 30 cases
and missed them on others:

| rule | missed |
|---|---|
| a flat allowance of 4 MB | on 19 others: median 3.2 %, an underestimate of 9.7 % |
| by kernels, every large product packed | one of 16 others, `vit` at half width: 12.1 % too high |

**Conditions.** The real steps run with MKL_DISABLE_FAST_MM=1, which makes MKL give the buffers of a
matrix product back when it is done; it did not slow training down. Without it, MKL keeps them: the
heap of the transformers is 5 to 15 MB larger and the goals are missed there. `--keep-mkl-buffers`
shows that.

**Where it holds.** x86 CPUs with AVX-512, oneDNN and MKL, on Linux. MKL's panels are 5 MB on
Intel's CPUs and about 1 MB on AMD's. LSTMs, 3-D convolutions and bfloat16 were measured on AMD's
only, and bfloat16 is not known for CPUs with AMX. CPUs without AVX-512 run other kernels, so
nothing is predicted for them. Made to play one (ONEDNN_MAX_CPU_ISA=AVX2, ATEN_CPU_CAPABILITY=avx2,
MKL_ENABLE_INSTRUCTIONS=AVX2), a CPU took up to 19 % more than these rules give: ResNet-18 with 2x2
maps, whose convolutions take four times their weights. With SSE4.1 they do so on 4x4 maps already.

"""


def main() -> int:
    """Run the chosen cases and print their tables."""
    parser = common.parser(__doc__)
    parser.add_argument("models", nargs="*", help="only these models")
    parser.add_argument("--keep-mkl-buffers", action="store_true")
    parser.add_argument("--write", action="store_true", help="all cases, into memory.md")
    parser.add_argument("--measure", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Case(**json.loads(options.measure)))))
        return 0
    if options.write and (options.models or options.smoke or options.keep_mkl_buffers):
        parser.error("memory.md has all cases, measured as it says: --write goes with nothing else")
    if options.keep_mkl_buffers:
        SETTINGS.clear()
    torch.set_num_threads(1)
    groups = {
        "Cases known when the estimate was made": CASES,
        "Unseen cases": UNSEEN,
        "LSTMs, 3-D convolutions, small maps, bfloat16": OTHERS,
    }
    if options.smoke:
        groups = {"Smoke": [Case("cnn", 48, optimizer="adam")]}
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder, "heap.so")
        compiler = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(counter), str(HERE / "heap.c")]
        subprocess.run(compiler, check=True)
        for title, cases in groups.items():
            chosen = [c for c in cases if not options.models or c.model in options.models]
            if chosen:
                reports.append(report(title, [run(case, counter) for case in chosen]))
                print(f"\n{reports[-1][0]}", flush=True)
    if options.write:
        text = "\n".join(table for table, _ in reports)
        (HERE / "memory.md").write_text(f"{INTRODUCTION}{text}")
    return 0 if all(met for _, met in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
