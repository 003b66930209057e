"""The work that every implementation does: three workloads, their data and their models.

Imports numpy and torch only, so that it runs unchanged in the environment of every peer. What an
implementation reports has one form, `Report`, from which `compare.py` sees that the work was the
same.
"""

import argparse
import itertools
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
LEARNING_RATE = 0.05
TEST_SAMPLES = 500
MEAN, DEVIATION = 0.5, 0.25
SEED = 0


@dataclass(frozen=True)
class Workload:
    """One federation: who trains what, on how much data.

    Attributes:
        title: What tables call it.
        model: "linear", "cnn" or "mlp"; sizewise's zoo has them under the same names.
        image: Channels, height and width of a sample.
        clients: How many there are.
        per_round: How many train in each round.
        samples: How many each client holds.
        batch: Samples in a local step.
        rounds: How many there are, unless the command line says otherwise.
        noise: Standard deviation of a pixel around its class's prototype, in steps of 1 of 255.
    """

    title: str
    model: str
    image: tuple[int, int, int]
    clients: int
    per_round: int
    samples: int
    batch: int
    rounds: int
    noise: float

    @property
    def steps(self) -> int:
        """Local steps of one client in one round."""
        return -(-self.samples // self.batch)


WORKLOADS = {
    "a": Workload("linear 784-10", "linear", (1, 28, 28), 1000, 10, 60, 10, 100, 600.0),
    "b": Workload("small CNN", "cnn", (3, 32, 32), 100, 10, 500, 50, 6, 100.0),
    "c": Workload("tiny MLP 64-32-10", "mlp", (1, 8, 8), 1000, 1000, 20, 20, 20, 30.0),
}


@dataclass(frozen=True)
class Data:
    """Images as bytes, (N, C, H, W), and their labels; client k owns the k-th run of rows."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


def make_data(workload: Workload) -> Data:
    """Return samples that can be learned: a random prototype for each class, and noise on top.

    Labels are drawn independently, so runs of equal length are iid shards of equal size.
    """
    random = np.random.default_rng(SEED)
    channels, height, width = workload.image
    # Sixteen patches of one colour each: something that a convolution with a small field can see.
    patches = random.uniform(0, 255, (CLASSES, channels, 4, 4)).astype(np.float32)
    prototypes = patches.repeat(height // 4, axis=2).repeat(width // 4, axis=3)
    count = workload.clients * workload.samples + TEST_SAMPLES
    labels = random.integers(0, CLASSES, count)
    images = np.empty((count, *workload.image), dtype=np.uint8)
    # In parts: the noise of all samples at once would take four times the memory of the images.
    for start in range(0, count, 5000):
        chosen = labels[start : start + 5000]
        noise = random.standard_normal((len(chosen), *workload.image), dtype=np.float32)
        noisy = prototypes[chosen] + workload.noise * noise
        images[start : start + 5000] = np.clip(noisy, 0, 255).astype(np.uint8)
    pixels, classes = torch.from_numpy(images), torch.from_numpy(labels)
    last = -TEST_SAMPLES
    # Copies, so that whoever shares or keeps the one part does not hold the other as well.
    return Data(
        pixels[:last].clone(), classes[:last].clone(), pixels[last:].clone(), classes[last:].clone()
    )


def normalise(images: Tensor) -> Tensor:
    """Turn bytes into what the models take, float32 of about -2 to 2."""
    return images.float().div_(255).sub_(MEAN).div_(DEVIATION)


def make_model(workload: Workload) -> nn.Module:
    """Return the network of a workload, the same layers as sizewise's of that name."""
    torch.manual_seed(SEED)
    pixels = int(np.prod(workload.image))
    if workload.model == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, CLASSES))
    if workload.model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    channels = (workload.image[0], 32, 64, 128)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    # No pool after the last convolution: there the mean over all pixels takes its place.
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1], CLASSES))


def train_client(
    model: nn.Module, images: Tensor, labels: Tensor, batch: int, generator: torch.Generator
) -> int:
    """Train a model for one epoch on one client's data, in place; return the steps taken."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    steps = 0
    for rows in torch.split(torch.randperm(len(labels), generator=generator), batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(normalise(images[rows])), labels[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
    return steps


@torch.no_grad()
def score(model: nn.Module, data: Data) -> tuple[float, float]:
    """Return the loss and the accuracy of a model on the test set."""
    model.eval()
    logits = model(normalise(data.test_inputs))
    right = (logits.argmax(1) == data.test_labels).float().mean()
    return float(F.cross_entropy(logits, data.test_labels)), float(right)


STARTED = "PEERS_STARTED"
"""Environment variable: when the process started that stands behind this one, if there is one."""


def started() -> float:
    """Return when this process started, or the one that replaced itself by this one (Linux)."""
    if STARTED in os.environ:
        return float(os.environ[STARTED])
    # The second field, the name, is in parentheses and may hold spaces; the 22nd is the start.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def since_start() -> float:
    """Return the seconds since the start, imports and all."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started()


@dataclass
class Report:
    """What an implementation did, and how long it took.

    Attributes:
        marks: Seconds from the start of the process to the end of each round.
        clients: How often a client was trained.
        steps: Local steps, over all clients and rounds.
        samples: Samples in those steps.
        loss: On the test set, after the last round.
        accuracy: Likewise.
        began: Seconds from the start of the process to the beginning of the first round.
        whole: Seconds from the start of the process to its last line.
    """

    marks: list[float] = field(default_factory=list)
    clients: int = 0
    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    accuracy: float = 0.0
    began: float = 0.0
    whole: float = 0.0

    def mark(self) -> None:
        """Note that a round has ended."""
        self.marks.append(since_start())

    def count(self, clients: int, steps: int, samples: int) -> None:
        """Add what some clients did."""
        self.clients += clients
        self.steps += steps
        self.samples += samples

    def print(self) -> None:
        """Print everything as the one line of JSON that `compare.py` reads."""
        ends = [self.began, *self.marks]
        rounds = [end - start for start, end in itertools.pairwise(ends)]
        whole = replace(self, whole=since_start())
        facts = {"rounds": rounds, "first_round": self.marks[0], **asdict(whole)}
        print(json.dumps(facts), flush=True)


@dataclass(frozen=True)
class Arguments:
    """What the command line of every implementation says."""

    workload: Workload
    workers: int


def arguments(description: str) -> Arguments:
    """Read `a|b|c [--workers N] [--rounds N]`, and hold this process to one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int)
    given = parser.parse_args()
    workload = WORKLOADS[given.workload]
    torch.set_num_threads(1)
    return Arguments(replace(workload, rounds=given.rounds or workload.rounds), given.workers)
