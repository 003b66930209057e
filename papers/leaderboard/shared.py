"""What the scripts of this folder share: the way to the scripts of the folder above."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

# Scripts of a folder are run as files, so the folder above is not on the path by itself.
sys.path.append(str(HERE.resolve().parent))
import choosing as choosing  # noqa: E402
import common as common  # noqa: E402
import fidelity as fidelity  # noqa: E402
import results as results  # noqa: E402
import suite as suite  # noqa: E402
