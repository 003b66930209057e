"""The names a config can use, with a line on each; gathered without importing torch."""

import ast
from pathlib import Path

from sizewise import methods, models
from sizewise.data import DATASETS, PARTITIONS
from sizewise.fleet.profiles import PROFILES


def names(what: str) -> dict[str, str]:
    """Return name and description of all methods, models, datasets, and so on."""
    if what == "methods":
        return {name: _first_line(path) for name, path in sorted(methods.files().items())}
    if what == "models":
        return models.catalogue()
    if what == "datasets":
        return {name: source.description for name, source in DATASETS.items()}
    if what == "partitions":
        return dict(PARTITIONS)
    if what == "profiles":
        return {name: profile.description for name, profile in PROFILES.items()}
    # The scenarios live with the fleet, which needs random generators and so torch.
    from sizewise.fleet.devices import SCENARIOS

    return {name: "budgets of " + ", ".join(s) + " models" for name, s in SCENARIOS.items()}


def _first_line(path: Path) -> str:
    """Return the first line of a method file's docstring, after its name."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition(": ")[2] or text.partition("\n")[0]
