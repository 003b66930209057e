"""Seconds per round of sizewise over a hand-written PyTorch loop that takes the same steps.

    python benchmarks/speed.py [--rounds N] [--repeats N]

(a) a small CNN, 100 devices, 10 a round, 500 CIFAR-shaped images each, batch 50;
(b) a 784-10 linear model, 1000 devices, 10 a round, 60 samples each, batch 10.

Both sides train the same devices on the same samples with the same optimiser, on one thread, and
keep their images as bytes. sizewise also checks every update, writes its logs and makes every round
durable; the loop does none of that. Runs alternate, so that both sides meet the same machine; the
figure is the ratio of the medians. Also: two workers over one process for (a), and the time from
the command line to the end of the first round with 1000 devices.
"""

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sizewise import config as configs
from sizewise import session
from sizewise.config import Config
from sizewise.data.dataset import Dataset
from sizewise.fleet import make_fleet

LIMITS = {"a": 1.10, "b": 1.50, "workers": 0.60, "first round": 5.0}


@dataclass(frozen=True)
class Case:
    """One workload."""

    name: str
    image: tuple[int, int, int]
    devices: int
    samples: int
    batch: int
    model: str

    def dataset(self) -> Dataset:
        """Return random images, as many as the devices hold together."""
        generator = torch.Generator().manual_seed(0)
        count = self.devices * self.samples
        images = torch.randint(0, 256, (count, *self.image), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (count,), generator=generator)
        test = images[:500].clone(), labels[:500].clone()
        names = tuple(map(str, range(10)))
        channels = self.image[0]
        return Dataset(
            "random", images, labels, *test, names, (0.5,) * channels, (0.25,) * channels
        )

    def config(self, rounds: int, workers: int = 1) -> Config:
        """Return the sizewise config of this workload."""
        return configs.from_dict(
            {
                "rounds": rounds,
                "model": {"name": self.model},
                "data": {"name": "random", "partition": "iid"},
                "fleet": {"devices": self.devices, "per_round": 10},
                "recipe": {"lr": 0.05, "batch": self.batch, "eval_every": rounds},
                "engine": {"workers": workers},
            }
        )


CASES = {
    "a": Case("small CNN", (3, 32, 32), 100, 500, 50, "cnn"),
    "b": Case("784-10 linear", (1, 28, 28), 1000, 60, 10, "linear"),
}


def sizewise_rounds(case: Case, data: Dataset, rounds: int, workers: int = 1) -> list[float]:
    """Return the wall time of each round of sizewise but the first and the last."""
    marks: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        session.started(case.config(rounds, workers), Path(folder) / "run", data) as federation,
    ):
        federation.run(lambda line, totals: marks.append(time.perf_counter()))
    # The last round also evaluates, which the loop does not.
    return [after - before for before, after in itertools.pairwise(marks[:-1])]


def loop_rounds(case: Case, data: Dataset, rounds: int) -> list[float]:
    """Return the wall time of each round of the hand-written loop but the first."""
    config = case.config(rounds)
    setting = session.prepare(config, data)
    model = copy.deepcopy(setting.method.module(setting.method.main))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fleet = make_fleet(config.fleet, lambda share: 0)
    images, labels = data.train_images, data.train_labels
    generator = torch.Generator().manual_seed(0)
    times = []
    for index in range(rounds):
        start = time.perf_counter()
        total: dict[str, Tensor] = {}
        samples = 0
        for device in fleet.sample(config.seed, index):
            rows = setting.partition.shard(device.id)
            model.load_state_dict(weights)
            model.train()
            optimizer = torch.optim.SGD(
                model.parameters(), config.recipe.lr, momentum=0.9, weight_decay=5e-4
            )
            for chosen in torch.split(
                rows[torch.randperm(len(rows), generator=generator)], case.batch
            ):
                inputs = images[chosen].float().div_(255).sub_(0.5).div_(0.25)
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels[chosen]).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                share = tensor.detach() * len(rows)
                total[name] = total[name] + share if name in total else share
            samples += len(rows)
        weights = {name: tensor / samples for name, tensor in total.items()}
        times.append(time.perf_counter() - start)
    return times[1:]


def first_round() -> float:
    """Return the seconds from the command line to the end of the first of 1000 devices' rounds."""
    settings = (
        *("fleet.devices=1000", "fleet.per_round=10", "model.name=linear", "rounds=1"),
        *("data.partition=draw", "data.samples_per_device=60", "fleet.budgets=['1GB']"),
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sizewise.cli", "run", "--out", f"{folder}/run", "--json"]
        command += [part for setting in settings for part in ("--set", setting)]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start


def main() -> None:
    """Measure everything and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, float] = {"first round": min(first_round() for _ in range(2))}
    for key, case in CASES.items():
        data = case.dataset()
        rounds = arguments.rounds if key == "a" else 20 * arguments.rounds
        ours: list[float] = []
        theirs: list[float] = []
        pooled: list[float] = []
        for _ in range(arguments.repeats):
            theirs += loop_rounds(case, data, rounds)
            ours += sizewise_rounds(case, data, rounds)
            if key == "a":
                pooled += sizewise_rounds(case, data, rounds, workers=2)
        bare, mine = statistics.median(theirs), statistics.median(ours)
        print(
            f"({key}) {case.name}: loop {bare * 1e3:.1f} ms, sizewise {mine * 1e3:.1f} ms a round"
        )
        results[key] = mine / bare
        if pooled:
            both = statistics.median(pooled)
            print(f"    2 workers {both * 1e3:.1f} ms a round")
            results["workers"] = both / mine
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} (a busy machine makes ratios of small times unreliable)")
    for name, value in results.items():
        limit = LIMITS[name]
        print(
            f"{name:12} {value:6.2f}   at most {limit:.2f}   {'ok' if value <= limit else 'OVER'}"
        )
    print(json.dumps({name: round(value, 3) for name, value in results.items()}))


if __name__ == "__main__":
    main()
