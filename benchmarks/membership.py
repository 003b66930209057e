"""A membership attack by loss on digits: what a model tells of its devices.

    python benchmarks/membership.py [--seeds N] [--rounds N] [--smoke]

Half of the training digits are dealt to devices of two sizes, two samples each; the others are
dealt to devices that do not exist. Of both, a fifth are odd: their labels are drawn at random, so
a model has to remember them to get them right. HeteroFL trains the first half, with and without
privacy.

The attacker has the final model. He says that a sample was trained on if its loss is below a
threshold, and that a device took part if the mean loss of its samples is. He finds the threshold on
half of all, of which he knows the truth, and is judged on the other half. His advantage is the rate
of right accusations less that of false ones: 0 is guessing, 1 is knowing. No attack on an (epsilon,
delta) private model can have more, for devices, than (e^epsilon - 1 + 2 delta) / (e^epsilon + 1).
"""

import contextlib
import io
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import common
import sizewise
from sizewise.data import sources
from sizewise.data.dataset import Dataset

SAMPLES = 2
"""Of each device."""

ODD = 5
"""One of so many devices has labels that are drawn at random."""

DELTA = 1e-4

PRIVACY: dict[str, dict[str, Any] | None] = {
    "none": None,
    "clipping alone": {"noise": 1e-6, "clip": 0.5},
    "epsilon 8": {"epsilon": 8.0, "clip": 0.5},
    "epsilon 1": {"epsilon": 1.0, "clip": 0.5},
}


@dataclass(frozen=True)
class Attacked:
    """One run: its accuracy, and what an attacker has over guessing."""

    accuracy: float
    trained: float
    samples: float
    devices: float
    odd_devices: float
    area: float


def halves(seed: int) -> tuple[Dataset, Dataset]:
    """Return digits with one half of the training samples, and with the other."""
    whole = sources.load("digits")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(whole.train_labels), generator=generator)
    count = len(order) // 2 // SAMPLES * SAMPLES

    def part(rows: Tensor) -> Dataset:
        inputs, labels = whole.train_inputs[rows], whole.train_labels[rows]
        owners = torch.arange(len(rows)) // SAMPLES
        drawn = torch.randint(10, labels.shape, generator=generator)
        labels = torch.where(owners % ODD == 0, drawn, labels)
        return replace(whole, train_inputs=inputs, train_labels=labels, groups=owners, divided=True)

    return part(order[:count]), part(order[count : 2 * count])


@torch.no_grad()
def losses(model: torch.nn.Module, data: Dataset) -> Tensor:
    """Return the loss of each training sample, (N,)."""
    outputs = model(data.transform()(data.train_inputs, None))
    return F.cross_entropy(outputs, data.train_labels, reduction="none")


def advantage(inside: Tensor, outside: Tensor) -> float:
    """Return what a threshold on scores (n,) that was found on the even ones gets on the odd."""
    thresholds = torch.cat([inside[::2], outside[::2]]).unique()  # type: ignore[no-untyped-call]

    def gained(number: int, threshold: Tensor) -> Tensor:
        right = (inside[number::2] <= threshold).float().mean(-1)
        return right - (outside[number::2] <= threshold).float().mean(-1)

    best = gained(0, thresholds[:, None]).argmax()
    return float(gained(1, thresholds[best]))


def area_under_curve(inside: Tensor, outside: Tensor) -> float:
    """Return how likely a member's score (n,) is below a stranger's (m,)."""
    below = (inside[:, None] < outside).float() + 0.5 * (inside[:, None] == outside).float()
    return float(below.mean())


def attacked(privacy: Mapping[str, Any] | None, seed: int, rounds: int) -> Attacked:
    """Train once, and attack the model."""
    inside, outside = halves(seed)
    devices = len(inside.train_labels) // SAMPLES
    own: dict[str, Any] = (
        {} if privacy is None else {"privacy": {"delta": DELTA, "seed": seed, **privacy}}
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        run = sizewise.federate(
            "mlp",
            inside,
            method="heterofl",
            rounds=rounds,
            out=Path(folder) / "run",
            seed=seed,
            model_options={"args": {"hidden": [32]}},
            fleet={
                "devices": devices,
                "per_round": devices // 4,
                "sampling": "poisson",
                "ratios": [0.5, 1.0],
            },
            recipe={
                "lr": 0.2,
                "momentum": 0.9,
                "weight_decay": 0.0,
                "epochs": 3,
                "batch": SAMPLES,
                "weighting": "equal",
                "eval_every": rounds,
            },
            engine={"together": devices, "save_every": rounds},
            **own,
        )
        model = run.model("full")
    members, strangers = losses(model, inside), losses(model, outside)
    outputs = model(inside.transform()(inside.train_inputs, None))
    right = (outputs.argmax(1) == inside.train_labels).float().mean()
    present, absent = (each.view(-1, SAMPLES).mean(1) for each in (members, strangers))
    return Attacked(
        accuracy=run.result["sizes"]["full"],
        trained=float(right),
        samples=advantage(members, strangers),
        devices=advantage(present, absent),
        odd_devices=advantage(present[::ODD], absent[::ODD]),
        area=area_under_curve(present[::ODD], absent[::ODD]),
    )


def bound(privacy: Mapping[str, Any] | None) -> str:
    """Return the largest advantage that an attack on devices can have."""
    if privacy is None or "epsilon" not in privacy:
        return "1"
    spent = math.exp(privacy["epsilon"])
    return f"{(spent - 1 + 2 * DELTA) / (spent + 1):.3g}"


def cell(values: list[float], percent: bool = False) -> str:
    """Return mean and deviation over the seeds."""
    scale, digits = (100, 1) if percent else (1, 3)
    spread = stdev(values) if len(values) > 1 else 0.0
    return f"{scale * fmean(values):.{digits}f} ± {scale * spread:.{digits}f}"


def main() -> None:
    """Attack runs with and without privacy, and print a table."""
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    seeds, rounds = (1, 1) if given.smoke else (given.seeds, given.rounds)
    torch.set_num_threads(1)
    print(
        common.head(
            "privacy",
            "test accuracy %",
            "training accuracy %",
            "advantage: samples",
            "devices",
            "odd devices",
            "area under their curve",
            "most possible",
        )
    )
    for name, privacy in PRIVACY.items():
        found = [attacked(privacy, seed, rounds) for seed in range(seeds)]
        cells = (
            cell([one.accuracy for one in found], percent=True),
            cell([one.trained for one in found], percent=True),
            cell([one.samples for one in found]),
            cell([one.devices for one in found]),
            cell([one.odd_devices for one in found]),
            cell([one.area for one in found]),
        )
        print(f"| {name} | {' | '.join(cells)} | {bound(privacy)} |", flush=True)
    print(common.load_average())


if __name__ == "__main__":
    main()
