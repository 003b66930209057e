"""What the scripts of this folder share: the way to `common` and `inside`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

# Scripts of a folder are run as files, so the folder above is not on the path by itself.
sys.path.append(str(HERE.resolve().parent))
import common as common  # noqa: E402
import inside as inside  # noqa: E402
