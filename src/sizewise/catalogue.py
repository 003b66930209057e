"""The names a config can use, with a line on each; gathered without importing torch."""

import ast
from pathlib import Path

from sizewise import methods, models
from sizewise.data import DATASETS, PARTITIONS


def names(what: str) -> dict[str, str]:
    """Return name and description of all methods, models, datasets, partitions or scenarios."""
    if what == "methods":
        return {name: _first_line(name) for name in methods.names()}
    if what == "models":
        return models.catalogue()
    if what == "datasets":
        return {name: source.description for name, source in DATASETS.items()}
    if what == "partitions":
        return dict(PARTITIONS)
    # The scenarios live with the fleet, which needs random generators and so torch.
    from sizewise.fleet import SCENARIOS

    return {name: "budgets of " + ", ".join(s) + " models" for name, s in SCENARIOS.items()}


def _first_line(method: str) -> str:
    """Return the first line of a method file's docstring, after its name."""
    path = Path(methods.__file__).with_name(f"{method.replace('-', '_')}.py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition(": ")[2] or text.partition("\n")[0]
