"""Which method for a fleet: what each would do, by planning, and what it reached on one like it.

Nothing is trained. Methods are planned with and without levers for the config's model, data and
fleet; what they take is that of the devices that the run would ask. The leaderboard's fleet that is
most like this one says what they are worth (`runs.leaderboard`).
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sizewise import methods
from sizewise.common.structure import format_bytes, plain
from sizewise.config import Config, from_dict
from sizewise.data.dataset import Dataset
from sizewise.errors import BudgetTooSmall, SizewiseError
from sizewise.fleet import clock
from sizewise.report.comparison import by_method
from sizewise.runs import leaderboard, preview
from sizewise.runs.leaderboard import Board, Shape, Standing
from sizewise.runs.preparation import Setting, loaded, prepare

PAGE = "papers/leaderboard/README.md"
PATIENCE = 10.0
"""Seconds after which no further method is planned: those that do best elsewhere come first.

They are the processor's: what is found does not depend on what else the machine does.
"""

LOOKED_AT = 500
"""Devices that are looked at for what a round takes: those of as many rounds as have so many."""

LARGE = 20_000_000
"""Bytes of a model from which on it saves time to plan without drawing its weights."""

SHORT = 0.1
"""What a method may lack to be advised: of the devices that it reached on the leaderboard, and of
the model, which nobody trains then."""

CLOSE = 0.02
"""By how much less than the best a method may have reached on the leaderboard to be advised for
what it saves, if the seeds there cannot tell the two apart."""

Tables = Mapping[str, Any]


@dataclass(frozen=True)
class Fit:
    """What a method would do on a fleet.

    Attributes:
        name: The method, and whether it pulls levers.
        method: The method.
        levers: `recipe.levers`.
        reach: The share of the devices that can take part.
        peak: The highest predicted bytes of a step of any of them.
        sent: Bytes of a round, both ways, in the mean.
        flops: FLOPs of a round on devices, likewise.
        seconds: Simulated time of a round, likewise; None if the speed of no device is known.
        classes: What each class of devices would do, as `sizewise plan --json` has it, in short.
        untrained: The share of the model that none of them trains.
        elsewhere: What it reached on the nearest fleet of the leaderboard.
    """

    name: str
    method: str
    levers: str
    reach: float
    peak: int
    sent: float
    flops: float
    seconds: float | None
    classes: tuple[Mapping[str, Any], ...]
    untrained: float = 0.0
    elsewhere: Standing | None = None


@dataclass(frozen=True)
class Advice:
    """What is known about methods for a config, without training anything.

    Attributes:
        whole: Bytes of a plain training step of the whole model.
        board: The nearest fleet of the leaderboard.
        distance: How far it is, 0 to 1.
        fits: What methods would do, the best of that board first.
        refused: Methods that cannot be used here, and why.
        left: Methods that were not looked at for want of time.
    """

    whole: int
    board: Board
    distance: float
    fits: tuple[Fit, ...]
    refused: Mapping[str, str]
    left: tuple[str, ...] = ()

    @property
    def recommended(self) -> Fit | None:
        """The best method of the board that reaches as many devices here; None if there is none.

        Of several that the board cannot tell apart and that are close, the one that reaches most
        devices here; then the one that takes least time or, if no device's speed is known, sends
        least.
        """
        known = [
            (fit, fit.elsewhere)
            for fit in self.fits
            if fit.elsewhere is not None
            and not fit.elsewhere.note
            and fit.reach >= fit.elsewhere.reach - SHORT
            and fit.untrained <= SHORT
        ]
        if not known:
            return None
        best = max(standing.accuracy for _, standing in known)
        margin = min(self.board.interval or 0.0, CLOSE)
        first = [fit for fit, standing in known if standing.accuracy >= best - margin]
        return min(first, key=lambda fit: (-round(fit.reach, 2), fit.seconds or 0.0, fit.sent))

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `sizewise advise --json` prints."""
        fit, board = self.recommended, self.board
        return {
            "whole": self.whole,
            "nearest": {
                **{key: getattr(board, key) for key in ("task", "fleet", "seeds", "interval")},
                "distance": self.distance,
                "page": PAGE,
            },
            "methods": [plain(one) for one in self.fits],
            "refused": dict(self.refused),
            "not_looked_at": list(self.left),
            "recommended": None if fit is None else {"method": fit.method, "levers": fit.levers},
            "reason": self.reason(),
        }

    def reason(self) -> str:
        """Return the recommendation in one sentence."""
        fit = self.recommended
        if fit is None or fit.elsewhere is None:
            return "No method of the leaderboard can be used here as it was there."
        place = self.board.fair.index(fit.elsewhere) + 1
        rank = "first" if place == 1 else f"number {place}"
        if fit.elsewhere in self.board.first[1:]:
            rank = "not told apart from the first"
        seeds = f"{self.board.seeds} seed{'s'[: self.board.seeds > 1]}"
        settings = f" ({', '.join(fit.elsewhere.settings)})" if fit.elsewhere.settings else ""
        return (
            f"Use {fit.name}: on the most similar fleet of the leaderboard ({self.board.title}, "
            f"{self.board.fleet_title}; {seeds}) it is {rank} with "
            f"{100 * fit.elsewhere.accuracy:.1f} %{settings}; here it reaches "
            f"{100 * fit.reach:.0f} % of the devices within their bytes and sends "
            f"{format_bytes(fit.sent)} a round."
        )


def advise(tables: Tables, patience: float = PATIENCE, dataset: Dataset | None = None) -> Advice:
    """Return what methods would do for a config, and which one to use.

    Args:
        tables: The config's tables; the method that they name gives its options to itself only.
        patience: Seconds after which no further method is planned.
        dataset: Data that is in memory already, in the place of what the config names.

    Raises:
        SizewiseError: The config is bad for every method.
    """
    start = time.process_time()
    config = _chosen("fedavg", "auto", tables)
    dataset = dataset or loaded(config)
    setting = prepare(config, dataset)
    shape = _shape(setting)
    sketched = _can_be_sketched(setting)
    board = leaderboard.nearest(leaderboard.read(), shape, bool(dataset.vocabulary))
    fits: list[Fit] = []
    refused: dict[str, str] = {}
    left: list[str] = []
    for method, levers in _wanted(board):
        name = leaderboard.row_name(method, levers)
        if fits and time.process_time() - start > patience:
            left.append(name)
            continue
        try:
            fit = _fit(name, _chosen(method, levers, tables), dataset, sketched)
        except SizewiseError as error:
            refused[name] = str(error)
            continue
        if not fit.reach:
            refused[name] = str(fit.classes[-1]["refused"])
        elif not any(_same(fit, other) for other in fits):
            fits.append(_placed(fit, board))
    fits.sort(key=lambda fit: (-(fit.elsewhere.accuracy if fit.elsewhere else 0.0), fit.name))
    whole, distance = setting.method.peak(setting.method.main), board.shape.distance(shape)
    return Advice(whole, board, round(distance, 4), tuple(fits), refused, tuple(left))


def _wanted(board: Board) -> Iterator[tuple[str, str]]:
    """Yield methods with and without levers: first those that may be advised, the best first."""
    every = [(m, levers) for levers in ("none", "auto") for m in sorted(methods.names())]

    def order(one: tuple[str, str]) -> tuple[bool, bool, float]:
        there = board.standing(*one)
        return (True, False, 0.0) if there is None else (False, bool(there.note), -there.accuracy)

    yield from sorted(every, key=order)


def _shape(setting: Setting) -> Shape:
    """Return what the devices of a fleet hold of the whole model; the setting has all levers."""
    method, groups = setting.method, setting.fleet.groups
    whole = method.peak(method.main)
    return Shape(
        tuple(
            (
                1.0 if group.memory is None else group.memory / whole,
                group.count / setting.fleet.total,
            )
            for group in groups
        ),
        method.levers.least(method.main, method.task.stage()) / whole,
    )


def _chosen(method: str, levers: str, tables: Tables) -> Config:
    """Return the config with a method, with or without levers."""
    chosen = dict(by_method(tables, [method])[method])
    chosen["recipe"] = {**chosen.get("recipe", {}), "levers": levers}
    return from_dict(chosen)


def _can_be_sketched(setting: Setting) -> bool:
    """Return whether a model is so large that it is worth it to plan without weights, and can be.

    Some look at values, to decide what to run: what is predicted for the whole model tells.
    """
    method, stage = setting.method, setting.method.task.stage()
    if method.costs.resident(method.main) < LARGE:
        return False
    try:
        sketch = prepare(setting.config, setting.dataset, sketched=True).method
        return sketch.cost(sketch.main, stage) == method.cost(method.main, stage)
    except Exception:
        return False


def _fit(name: str, config: Config, dataset: Dataset, sketched: bool) -> Fit:
    """Return what a config's method would do, planned without weights where that works."""
    if sketched:
        with suppress(Exception):  # Whatever it is, it is said with weights.
            return _planned(name, prepare(config, dataset, sketched=True))
    return _planned(name, prepare(config, dataset))


def _planned(name: str, setting: Setting) -> Fit:
    """Return what the method of a setting would do."""
    config = setting.config
    rows = preview.rows_of(setting, wishes=False)
    able = [row for row in rows if not row["refused"]]
    devices = sum(row["devices"] for row in rows)
    sent, flops, seconds = _round(setting, {row["group"]: row for row in able})
    kept = ("group", "devices", "budget", "size", "levers", "predicted", "bytes_down", "bytes_up")
    return Fit(
        name,
        config.method.name,
        config.recipe.levers[0],
        sum(row["devices"] for row in able) / devices,
        max((row["predicted"] for row in able), default=0),
        sent,
        flops,
        seconds,
        tuple({key: row.get(key) for key in (*kept, "steps", "flops", "refused")} for row in rows),
        0.0 if (left := rows[0]["untrained"]) is None else left["share"],
    )


def _round(
    setting: Setting, rows: Mapping[str, Mapping[str, Any]]
) -> tuple[float, float, float | None]:
    """Return bytes, FLOPs and simulated seconds of a round, in the mean over the run's rounds.

    Who is asked follows from the seed, so these are the devices that a run asks.

    Args:
        setting: The run.
        rows: What each class of devices that can take part does, at most.
    """
    method, state, config = setting.method, setting.start, setting.config
    drawn = _draws(setting)
    sent, flops, lasted = [], [], []
    for number in range(max(1, min(config.rounds, LOOKED_AT // config.fleet.per_round))):
        asked = [d for d in setting.fleet.sample(config.seed, number) if d.group in rows]
        work = [
            preview.work_of(setting, state, method.plan(state, device, number))
            if drawn
            else rows[device.group]
            for device in asked
        ]
        sent.append(sum(row["bytes_down"] + row["bytes_up"] for row in work))
        flops.append(sum(row["flops"] for row in work))
        taken = [
            clock.seconds(device, row["bytes_down"], row["flops"], row["bytes_up"])
            for device, row in zip(asked, work, strict=True)
        ]
        lasted.append(clock.Clock(config.fleet.deadline).round(taken))
    known = [seconds for seconds in lasted if seconds is not None]
    return fmean(sent), fmean(flops), fmean(known) if known else None


def _draws(setting: Setting) -> bool:
    """Return whether devices get other submodels than the largest that their class may get."""
    method, state = setting.method, setting.start
    for device in setting.fleet.sample(setting.config.seed, 0):
        try:
            plans = [plan(state, device, 0) for plan in (method.plan, method.plan_upper_bound)]
        except BudgetTooSmall:
            continue
        if plans[0].submodel.shape_key != plans[1].submodel.shape_key:
            return True
    return False


def _same(fit: Fit, other: Fit) -> bool:
    """Return whether two fits are one method whose levers change nothing."""
    return fit.method == other.method and fit.classes == other.classes


def _placed(fit: Fit, board: Board) -> Fit:
    """Return a fit with what its method reached on a board."""
    return replace(fit, elsewhere=board.standing(fit.method, fit.levers))
