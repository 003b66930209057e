"""What the scripts of this folder share: where suites leave their runs, and how they write."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# Scripts of a folder are run as files, so the folder above is not on the path by itself.
sys.path.append(str(HERE.parent))
from common import COLOURS, save, scale, write  # noqa: E402

__all__ = ["COLOURS", "HERE", "histories", "save", "scale", "write"]


def histories(suite: str, scale: str) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the rounds of each row's runs, one list a seed; rows without runs are left out."""
    tables = tomllib.loads((HERE / f"{suite}.toml").read_text(encoding="utf-8"))
    folder = Path("runs/papers", f"fedin-{suite}-{scale}")
    found = {}
    for row in tables["row"]:
        name = row.replace(" ", "_").replace("/", "_")
        paths = [folder / f"{name}-{seed}" for seed in tables["scale"][scale]["seeds"]]
        paths = [path / "history.jsonl" for path in paths if (path / "result.json").exists()]
        if paths:
            found[row] = [[json.loads(line) for line in p.read_text().splitlines()] for p in paths]
    if not found:
        raise SystemExit(f"{folder} has no finished runs; start papers/suite.py first")
    return found
