"""What methods reached on the fleets of the leaderboard, for whoever asks which one to use.

`leaderboard.json` beside this file is made from the runs of `papers/leaderboard`, by its `page.py`.
Fleets compare by what their devices hold of a training step of the whole model, plain and with
levers, as in `Shape`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from sizewise.common.structure import build

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Shape:
    """What the devices of a fleet hold of the whole model.

    Attributes:
        shares: For each class, the share of a plain training step that it holds, and its part of
            the fleet.
        least: The share of a plain step that one takes with all levers.
    """

    shares: tuple[tuple[float, float], ...]
    least: float

    @property
    def reach(self) -> float:
        """The part of the fleet that can train the whole model, with levers."""
        return sum(part for share, part in self.shares if share >= self.least)

    def distance(self, other: "Shape") -> float:
        """Return how far another fleet is from this one, 0 to 1: the mean of two differences.

        One is the share by which devices of the one, in order of their bytes, differ from those of
        the other in the mean; whoever holds the whole step holds no more of it with more bytes. The
        other is that of the parts that can train the whole model, which decides what methods are
        worth.
        """
        ours, theirs = self._steps, other._steps
        ends = sorted({0.0, 1.0, *ours, *theirs})
        area = sum(
            abs(_held(ours, low) - _held(theirs, low)) * (high - low)
            for low, high in pairwise(ends)
        )
        return (area + abs(self.reach - other.reach)) / 2

    @cached_property
    def _steps(self) -> dict[float, float]:
        """Where each class begins in the fleet, sorted by share, and what it holds."""
        found, start = {}, 0.0
        for share, part in sorted(self.shares):
            found[start] = min(1.0, share)
            start = round(start + part, 9)
        return found


def _held(steps: Mapping[float, float], place: float) -> float:
    """Return the share that the device at a place of a sorted fleet holds."""
    return steps[max(start for start in steps if start <= place)]


@dataclass(frozen=True)
class Standing:
    """What a method reached on a board, as means over the seeds.

    Attributes:
        name: Its row on the page: the method, and whether it pulled levers.
        method: Its name.
        levers: What `recipe.levers` was.
        accuracy: Of its main model on the test set, 0 to 1.
        worst: Of the class of devices that is served worst, each device with its model on its own
            samples; None if none of them has a model.
        reach: The share of the devices that were asked and took part.
        sent: Bytes of a run, both ways.
        flops: Of a run, on devices.
        peak: Highest metered peak of any device, in bytes.
        seconds: Simulated time of a run.
        by_seed: The accuracies of the seeds.
        note: Why it is not to be advised, whatever it reached; empty if nothing is against it.
        settings: What it had of its own, as `--set` takes it, such as its learning rate.
    """

    name: str
    method: str
    levers: str
    accuracy: float
    worst: float | None
    reach: float
    sent: int
    flops: int
    peak: int
    seconds: float
    by_seed: tuple[float, ...]
    note: str = ""
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Board:
    """One task on one fleet.

    Attributes:
        task: The task's short name.
        title: The task, for people.
        fleet: The fleet's short name.
        fleet_title: The fleet, for people.
        text: Whether samples are texts.
        shape: What its devices hold of the whole model.
        interval: Half of the 95 % interval of a difference of two rows; None of a single seed.
        rows: What was reached, best first.
    """

    task: str
    title: str
    fleet: str
    fleet_title: str
    text: bool
    shape: Shape
    rows: tuple[Standing, ...]
    interval: float | None = None

    @cached_property
    def fair(self) -> tuple[Standing, ...]:
        """The rows that nothing is against."""
        return tuple(row for row in self.rows if not row.note)

    @property
    def seeds(self) -> int:
        """How many seeds all rows have."""
        return min(len(row.by_seed) for row in self.rows)

    @cached_property
    def first(self) -> tuple[Standing, ...]:
        """The best row, and all that cannot be told apart from it; of one seed, the best alone."""
        best, margin = self.fair[0], self.interval or 0.0
        return tuple(row for row in self.fair if row.accuracy >= best.accuracy - margin)

    def standing(self, method: str, levers: str) -> Standing | None:
        """Return the row of a method, if it has one."""
        return next((r for r in self.rows if (r.method, r.levers) == (method, levers)), None)


def row_name(method: str, levers: str) -> str:
    """Return what the row of a method is called."""
    return method if levers == "none" else f"{method}, levers"


def read() -> tuple[Board, ...]:
    """Return all boards that come with the library."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(build(Board, board, "leaderboard") for board in found)


def nearest(boards: Sequence[Board], shape: Shape, text: bool) -> Board:
    """Return the board whose fleet is most like another, of the same kind of samples if any is."""
    alike = [board for board in boards if board.text == text]
    return min(alike or boards, key=lambda board: board.shape.distance(shape))
