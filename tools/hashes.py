"""What every method computes, as hashes: a change that should not alter results leaves them alone.

    python tools/hashes.py            # compare with hashes.json; exit code 1 if a run differs
    python tools/hashes.py --write    # record them

A short run of each method, on two models and two seeds. The last bits depend on the CPU, so the
list names the one it was made on, and elsewhere a comparison says that it means nothing. To compare
two versions there, record the older one first.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sizewise import config as configs
from sizewise.common import environment
from sizewise.errors import SizewiseError
from sizewise.runs import catalogue, session

LIST = Path(__file__).with_name("hashes.json")
ROUNDS, SEEDS = 4, (0, 1)
MODELS: dict[str, dict[str, Any]] = {
    "cnn": {"name": "cnn", "args": {"layers": [6, 8, 8, 12]}},
    "preresnet8": {"name": "preresnet8"},
}
# With these, the depth methods have devices of several depths, and one that holds two models.
RATIOS = {"local": [1.0], "fedin": [2.0], "fedgkt": [2.0]}
CLIENTS: dict[str, dict[str, Any]] = {
    "cnn": {"client": "cnn", "client_args": {"layers": [6, 8]}, "server_epochs": 1},
    "preresnet8": {"client": "preresnet8", "server_epochs": 1},
}


def runs() -> Iterator[tuple[str, configs.Config]]:
    """Yield every run: its name and its config."""
    for method in catalogue.names("methods"):
        for model, seed in ((m, s) for m in MODELS for s in SEEDS):
            options = CLIENTS[model] if method == "fedgkt" else {}
            yield (
                f"{method} {model} {seed}",
                configs.from_dict(
                    {
                        "seed": seed,
                        "rounds": ROUNDS,
                        "model": MODELS[model],
                        "data": {"train_limit": 160, "test_limit": 40},
                        "fleet": {
                            "devices": 6,
                            "per_round": 4,
                            "ratios": RATIOS.get(method, [0.7, 0.9, 2.0]),
                        },
                        "method": {"name": method, **options},
                        "recipe": {"batch": 16, "lr": 0.05, "eval_batch": 40},
                    }
                ),
            )


def result_of(config: configs.Config) -> str:
    """Return the hash that a run ends with, or the sentence that refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with session.started(config, Path(folder) / "run") as federation:
                return str(federation.run()["state_sha256"])
        except SizewiseError as error:
            return f"refused: {error}"


def main() -> int:
    """Compare or record; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="record what comes out")
    parser.add_argument("--only", default="", help="runs whose name begins like this")
    chosen = parser.parse_args()
    found = {}
    for name, config in runs():
        if name.startswith(chosen.only):
            found[name] = result_of(config)
            print(name, found[name][:12], flush=True)
    here = {key: environment.environment()[key] for key in ("torch", "numpy", "cpu", "cpu_limits")}
    if chosen.write:
        LIST.write_text(json.dumps({"environment": here, "runs": found}, indent=1) + "\n")
        return 0
    recorded = json.loads(LIST.read_text())
    if recorded["environment"] != here:
        print(f"the list is of {recorded['environment']}, this is {here}: nothing to compare")
        return 0
    differ = [name for name, value in found.items() if recorded["runs"].get(name) != value]
    print(f"{len(found) - len(differ)} of {len(found)} as recorded", *differ, sep="\n  ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
