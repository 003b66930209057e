"""Write requirements.lock: one set of pins for the core and every extra.

pip resolves everything together (without installing it), so that a single environment can hold all
extras at once. Run it as `make lock`. The lock is used as a constraints file: each target installs
only what it needs, always at these versions.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Made by `make lock`: the core and every extra together. Used as constraints.\n"


def resolve() -> list[str]:
    """Ask pip which versions it would install, as sorted `name==version` lines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ",".join(project["optional-dependencies"])
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
        *("--report", "-", f"{ROOT}[{extras}]", "torch==2.13.0", *build),
    ]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    pins = {item["metadata"]["name"]: item["metadata"]["version"] for item in report["install"]}
    del pins[project["name"]]
    # A local version such as 2.13.0+cpu names one machine's build; the public version is the pin.
    return sorted(f"{name.lower()}=={version.split('+')[0]}" for name, version in pins.items())


if __name__ == "__main__":
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(resolve()) + "\n")
