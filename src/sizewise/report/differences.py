"""In what the runs of a report differ: keys of their configs, facts of their machines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sizewise.common.structure import flat
from sizewise.report.records import Run, by_row

_OF_A_RUN = ("started",)
"""Facts of an environment that are another one in every run."""


@dataclass(frozen=True)
class Difference:
    """A dotted key, and its value in each run as text; "" where a run has no such key."""

    key: str
    values: tuple[str, ...]


def between(tables: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Return the keys in which some tables differ.

    An option that one method has and another lacks is no difference; any other key is.
    """
    known = [dict(flat(one)) for one in tables]
    found = []
    for key in dict.fromkeys(key for one in known for key in one):
        values = tuple(_shown(one.get(key)) for one in known)
        own = key.startswith("method.")
        if len({value for value in values if value or not own}) > 1:
            found.append(Difference(key, values))
    return found


def of_configs(runs: Sequence[Run]) -> list[Difference]:
    """Return what differs between the configs of the rows, each by its first run."""
    return between([some[0].config for some in by_row(runs).values()])


def of_environments(runs: Sequence[Run]) -> list[Difference]:
    """Return in what the machines and versions of runs differ."""
    return between(
        [{k: v for k, v in run.environment.items() if k not in _OF_A_RUN} for run in runs]
    )


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, default=str)
