"""The environments of the implementations: one each, with pinned versions."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

TORCH = ("torch==2.13.0", "numpy==2.4.6")

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "bare": TORCH,
    "sizewise": (*TORCH, "--constraint", str(ROOT / "requirements.lock"), "--editable", str(ROOT)),
    # Not 1.42.0, which asks for a certifi that the package index at hand does not have; see README.
    "flower": (*TORCH, "flwr[simulation]==1.41.0", "ray==2.55.1"),
    "pfl": (*TORCH, "pfl[pytorch]==0.6.0"),
}


def python_of(name: str, folder: Path) -> Path:
    """Return the interpreter of an implementation's environment, which is made if need be."""
    place = folder.resolve() / name
    python, finished = place / "bin" / "python", place / "installed.txt"
    wanted = "\n".join(REQUIREMENTS[name])
    if not finished.exists() or finished.read_text() != wanted:
        print(f"making the environment of {name} in {place}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]]
        subprocess.run(install, check=True, stdout=sys.stderr)
        # Written last: an installation that broke off is done again.
        finished.write_text(wanted)
    return python
