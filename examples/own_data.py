"""Bring your own data: the same 2,000 images in eleven forms train the same model, to the bit.

python examples/own_data.py
"""

import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

import sizewise
from sizewise.data.samples import held_out

OWNERS = 4
# Sorted by class, as the files of a folder of images are.
LABELS = np.arange(2000) * 8 // 2000
NOISE = np.random.default_rng(0).integers(0, 200, (2000, 8, 8), dtype=np.uint8)
IMAGES = NOISE // 2 + (np.arange(8) == LABELS[:, None])[:, None] * np.uint8(120)
WHOSE = np.random.default_rng(1).integers(0, OWNERS, 2000)


class Pictures(Dataset[tuple[Image.Image, int]]):
    """What torchvision gives: a picture and a number."""

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(LABELS)

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        """Return one picture and its class."""
        return Image.fromarray(IMAGES[number]), int(LABELS[number])


def forms(folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield a form's name, the data, and what goes beside it."""
    pictures = Pictures()
    tensors = TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    yield "torch Dataset", pictures, {}
    tested = held_out(torch.from_numpy(LABELS), 0.2)
    halves = (np.flatnonzero(half).tolist() for half in (~tested, tested))
    yield "pair of them", tuple(Subset(pictures, half) for half in halves), {}
    yield "TensorDataset", tensors, {}
    yield "arrays", (IMAGES, LABELS), {}

    columns = {"image": list(map(Image.fromarray, IMAGES)), "label": LABELS}
    hugging = datasets.Dataset.from_dict(columns)
    yield "Hugging Face", hugging, {}
    frame = pandas.DataFrame({"image": list(IMAGES), "stripe": LABELS})
    yield "pandas frame", frame, {"label": "stripe"}

    paths = [folder / "images" / str(label) / f"{i:04}.png" for i, label in enumerate(LABELS)]
    for path, picture in zip(paths, columns["image"], strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    yield "folder of images", folder / "images", {}
    hugging.to_parquet(folder / "mine.parquet")
    yield "parquet", folder / "mine.parquet", {}
    with (folder / "mine.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label"])
        rows = zip(paths, LABELS, strict=True)
        table.writerows((path.relative_to(folder), label) for path, label in rows)
    yield "CSV of paths", folder / "mine.csv", {}

    shares = [np.flatnonzero(owner == WHOSE) for owner in range(OWNERS)]
    yield "one per device", [Subset(tensors, share.tolist()) for share in shares], {}
    order = np.concatenate(shares)
    frame = pandas.DataFrame(
        {"image": list(IMAGES[order]), "label": LABELS[order], "whose": WHOSE[order]}
    )
    yield "owner column", frame, {"owner": "whose"}


def main() -> None:
    """Train on each form, and print a table."""
    states: dict[str, set[str]] = {"iid": set(), "given": set()}
    print(f"{'data':<18} {'split':<6} state_sha256")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, data, options) in enumerate(forms(Path(folder))):
            run = sizewise.federate(
                "cnn",
                data,
                rounds=3,
                model_options={"args": {"layers": [8, 16]}},
                data_options=options,
                fleet={"devices": OWNERS, "per_round": 2},
                out=Path(folder) / f"run-{number}",
            )
            split = "given" if name in ("one per device", "owner column") else "iid"
            states[split].add(run.result["state_sha256"])
            print(f"{name:<18} {split:<6} {run.result['state_sha256'][:16]}")
    different = sum(len(found) for found in states.values())
    print(f"accuracy {run.accuracy:.3f}; {different} different states for {len(states)} splits")


if __name__ == "__main__":
    main()
