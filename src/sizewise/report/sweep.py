"""A sweep: the rows of a comparison, each with every combination of some values of the config."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from sizewise import config as configs
from sizewise.config import Config
from sizewise.errors import ConfigError

Grid = Mapping[str, Sequence[Any]]
"""The values to try, by the dotted key of the config that takes them."""

_OTHERWISE = {"seed": "seeds", "method": "methods", "method.name": "methods"}
"""What a comparison varies by options of their own."""


def read(options: Iterable[str]) -> Grid:
    """Return the grid of `--vary recipe.lr=0.01,0.1` options: values are TOML, or else text."""
    grid: dict[str, Sequence[Any]] = {}
    for option in options:
        key, separator, text = option.partition("=")
        if not separator or not key.strip() or not text.strip():
            raise ConfigError(
                f"--vary takes a key and its values, such as recipe.lr=0.01,0.1, not {option!r}"
            )
        if key.strip() in grid:
            raise ConfigError(f"--vary {key.strip()} is given twice; give all its values at once")
        whole = configs.parsed(f"[{text}]")  # A value may be a list, with commas of its own.
        grid[key.strip()] = whole if isinstance(whole, list) else _words(text)
    return grid


def _words(text: str) -> list[Any]:
    return [configs.parsed(part) for part in text.split(",") if part.strip()]


def rows(tables: Mapping[str, Mapping[str, Any]], grid: Grid) -> dict[str, Mapping[str, Any]]:
    """Return each row once for every combination of values, named after them.

    Args:
        tables: The config's tables of each row, by its name.
        grid: What to vary; without any, the rows stay as they are.

    Raises:
        ConfigError: There is nothing to try, or what to vary is no key of a config.
    """
    for key, tried in grid.items():
        if key in _OTHERWISE:
            raise ConfigError(f"{_OTHERWISE[key]} says what to compare; leave {key!r} out of vary")
        if isinstance(tried, str) or not isinstance(tried, Sequence) or not tried:
            raise ConfigError(f"vary {key!r} takes a list of values to try, not {tried!r}")
    found: dict[str, Mapping[str, Any]] = {}
    for row, base in tables.items():
        for chosen in product(*grid.values()):
            changed = copy.deepcopy(dict(base))
            for key, value in zip(grid, chosen, strict=True):
                configs.put(changed, key, value, f"vary {key!r}")
            found[" ".join((row, *_named(grid, chosen)))] = changed
    return found


def _named(grid: Grid, chosen: Iterable[Any]) -> Iterator[str]:
    """Yield a combination's values for people: by the last word of a key, if that is enough."""
    last = [key.rpartition(".")[2] for key in grid]
    for key, short, value in zip(grid, last, chosen, strict=True):
        shown = value if isinstance(value, str) else json.dumps(value, default=str)
        yield f"{short if last.count(short) == 1 else key}={shown}"


def values(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of some dotted keys in a config; None for what has none."""
    found = {}
    for key in keys:
        value: Any = config.to_dict()
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found[key] = value
    return found
