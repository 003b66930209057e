"""What the scripts of this folder share: the way to `common` and `inside`, and runs' rounds."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

# Scripts of a folder are run as files, so the folder above is not on the path by itself.
sys.path.append(str(HERE.resolve().parent))
import common as common  # noqa: E402
import inside as inside  # noqa: E402


def histories(runs: common.Runs) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the rounds of each row's finished runs, one list a seed."""
    found = runs.begun(mark="result.json")
    return {
        row: [common.lines_of(path / "history.jsonl") for path in paths]
        for row, paths in found.items()
    }
