"""Bring your own model: an ordinary nn.Module, a fleet in bytes, a few rounds.

python examples/own_model.py
"""

import tempfile
from pathlib import Path

from torch import nn

from sizewise import config, session


def build(classes: int) -> nn.Module:
    """Return a small network for 8x8 images; sizewise finds it as "own_model:build"."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, classes))


def main() -> None:
    """Train it on handwritten digits, on devices of two sizes."""
    chosen = config.from_dict(
        {
            "rounds": 15,
            "model": {"name": "own_model:build"},
            "data": {"name": "digits", "partition": "balanced-dirichlet", "alpha": 1.0},
            "fleet": {"devices": 20, "per_round": 5, "budgets": ["100kB", "1MB"]},
            "recipe": {"lr": 0.1, "epochs": 3},
        }
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        session.started(chosen, Path(folder) / "run") as federation,
    ):
        result = federation.run()
    print(f"accuracy {result['accuracy']:.3f}")
    for group, budget in result["budget_bytes"].items():
        print(f"{group}: {result['peak_bytes'][group]:,} of {budget:,} bytes at the peak")


if __name__ == "__main__":
    main()
