"""What the scripts of this folder share: where they write, and how."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

# Scripts of a folder are run as files, so the folder above is not on the path by itself.
sys.path.append(str(HERE.parent))
from common import COLOURS, save, write  # noqa: E402

__all__ = ["COLOURS", "HERE", "save", "write"]
