"""Make the leaderboard's page, and the figures that the library ships, from the suites' results.

    python papers/leaderboard/page.py

Writes `README.md` here, `leaderboard.json` in `src/sizewise/runs`, which `sizewise advise` reads,
and the short form in the README of the project, between two comments. Every sentence about results
follows from them by a rule, so the page is true of what was run, however much that is.
"""

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from boards import FLEETS, TASKS, Task
from shared import HERE, common
from sizewise import methods
from sizewise.common.structure import plain
from sizewise.runs.leaderboard import FILE, Board, Standing

PROJECT = HERE.resolve().parents[1] / "README.md"
PROTOCOL = HERE / "protocol.md"
"""How it is run: the only part of the page that is written by hand."""

MARKS = ("<!-- leaderboard: made by papers/leaderboard/page.py -->", "<!-- /leaderboard -->")


def fleets(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield the table of fleets."""
    yield from ("", "## Fleets", "")
    titles = [task.tables["about"]["title"] for task in tasks]
    yield from common.table("", *titles)
    for column, title in FLEETS.items():
        cells = []
        for task in tasks:
            fleet = task.fleet(column)
            kinds = [
                f"{group.count} of {group.name} ({share:.0%})"
                for group, (share, _) in zip(fleet.groups, task.shape(column).shares, strict=True)
            ]
            cells.append(", ".join(kinds))
        yield f"| **{title}** | {' | '.join(cells)} |"
    least = ", ".join(f"{task.shape('even').least:.0%}" for task in tasks)
    yield from (
        "",
        "In brackets: the share of a plain training step of the whole model that such a device "
        "holds. With all",
        f"levers the whole model takes {least} of it.",
        "They are simulated as Raspberry Pi Zero 2 W (the least bytes), 4 and 5 (the most).",
    )


def percent(value: float | None) -> str:
    """Return a share in %, empty if there is none."""
    return "" if value is None else f"{100 * value:.1f}"


def table(board: Board) -> Iterator[str]:
    """Yield the table of a board."""
    several = board.seeds > 1
    heads = ("accuracy %", *(["by seed"] if several else []), "worst class %", "reach %")
    yield from common.table("", *heads, "sent MB", "TFLOP", "peak MB", "time s")
    for row in board.rows:
        name = f"**{row.name}**" if row in board.first else row.name
        name = f"*{row.name}*" if row.note else name
        cells = [percent(row.accuracy)]
        cells += [" ".join(map(percent, row.by_seed))] if several else []
        cells += [percent(row.worst), f"{100 * row.reach:.0f}", f"{row.sent / 1e6:,.1f}"]
        cells += [f"{row.flops / 1e12:.3g}", f"{row.peak / 1e6:.2f}", f"{row.seconds:,.3g}"]
        yield f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |")


def verdict(board: Board) -> str:
    """Return what a board says, in words."""
    best, *others = board.first
    said = [f"**{board.title}**: `{best.name}` is first with {percent(best.accuracy)} %"]
    if board.interval is None:
        runner = board.fair[1:2]
        said += [f", before `{r.name}` ({percent(r.accuracy)})" for r in runner]
        said.append("; one seed, so there is no interval.")
    elif others:
        names = ", ".join(f"`{row.name}`" for row in others)
        said.append(f"; not told apart from it within {100 * board.interval:.1f} points: {names}.")
    else:
        second = board.fair[1]
        said.append(
            f", more than the interval of {100 * board.interval:.1f} points before "
            f"`{second.name}` ({percent(second.accuracy)})."
        )
    said += cheaper(board)
    served = max(board.fair, key=lambda row: row.worst or 0.0)
    if served.worst is not None:
        said.append(
            f" The worst class is served best by `{served.name}` ({percent(served.worst)} %)."
        )
    return "".join(said)


def cheaper(board: Board) -> Iterator[str]:
    """Yield which of the first rows, or of those close behind, cost less than the best."""
    best = board.first[0]
    near = [row for row in board.fair if row.accuracy >= best.accuracy - CLOSE]
    sends, takes = (min(near, key=attrgetter(cost)) for cost in ("sent", "seconds"))
    words = []
    if sends.sent < best.sent:
        figures = f"{sends.sent / 1e6:,.0f} MB against {best.sent / 1e6:,.0f}"
        words.append(f"`{sends.name}` sends least ({figures})")
    if takes.seconds < best.seconds:
        figures = f"{takes.seconds:,.3g} s against {best.seconds:,.3g}"
        words.append(f"`{takes.name}` takes least time ({figures})")
    if words:
        yield f" Of all within {100 * CLOSE:.0f} points, {' and '.join(words)}."


CLOSE = 0.02
"""By how much a row may be behind the first to count as close."""

KINDS = {
    "one model for all": ("fedavg", "fedprox", "fedadam", "small", "allsmall"),
    "width": ("heterofl", "fjord", "fedrolex", "feddropout", "splitmix"),
    "depth": ("fedepth", "m-fedepth", "slt", "depthfl", "inclusivefl"),
    "both": ("nefl",),
    "adapters": ("fedlora", "ffa-lora", "hetlora", "flexlora", "flora"),
}
"""What methods give a device less of, or beside the model."""


def why(board: Board) -> str:
    """Return what bytes, weak devices, levers and kinds of methods make out on a board."""
    rows = {row.name: row for row in board.rows}
    best = board.fair[0].accuracy
    said = []
    if whole := rows.get("alllarge"):
        gap = 100 * (whole.accuracy - best)
        said.append(
            f"Without budgets (`alllarge`) it would be {percent(whole.accuracy)}: {gap:+.1f}"
        )
    if strong := rows.get("exclusive"):
        gap = 100 * (best - strong.accuracy)
        said.append(
            f"with the devices alone that hold the whole model (`exclusive`), "
            f"{percent(strong.accuracy)}: the others are worth {gap:+.1f}"
        )
    pairs = [
        row.accuracy - rows[row.method].accuracy
        for row in board.rows
        if row.levers != "none" and row.method in rows
    ]
    if pairs:
        better = sum(change > 0 for change in pairs)
        said.append(
            f"levers change a row by {100 * fmean(pairs):+.1f} in the mean, {better} of "
            f"{len(pairs)} for the better"
        )
    kinds = []
    for kind, methods_of_it in KINDS.items():
        if first := next((row for row in board.fair if row.method in methods_of_it), None):
            kinds.append(f"{kind} `{first.name}` {percent(first.accuracy)}")
    return f"{'; '.join(said)}. The best of each kind: {', '.join(kinds)}."


def choice(found: Sequence[tuple[Task, Board]]) -> str:
    """Return which rows are nearest to the first over all tasks of a fleet."""
    standings = [task.standings(board) for task, board in found]
    firsts = [board.fair[0].accuracy for _, board in found]
    behind = {
        name: fmean(
            first - rows[name].accuracy for first, rows in zip(firsts, standings, strict=True)
        )
        for name in set.intersection(*map(set, standings))
    }
    order = sorted(behind, key=lambda name: (behind[name], name))[:3]
    listed = ", ".join(f"`{name}` ({100 * behind[name]:.1f} points behind)" for name in order)
    best = order[0]
    where = found[0][1].title if len(found) == 1 else f"{len(found)} tasks"
    reached = [rows[best].reach for rows in standings]
    low, high = (f"{100 * end(reached):.0f}" for end in (min, max))
    return (
        f"**Use `{best}`**: over {where} it is nearest to the first in the mean: {listed}. It "
        f"reached {low if low == high else f'{low} to {high}'} % of the devices that were asked."
    )


def wrapped(text: str) -> list[str]:
    """Return a paragraph in lines, and an empty one."""
    return [*textwrap.wrap(text, 105, break_long_words=False, break_on_hyphens=False), ""]


def sections(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield what was found, fleet by fleet."""
    for column, title in FLEETS.items():
        found = [(task, board) for task in tasks if (board := task.board(column)) is not None]
        yield from ("", f"## Fleet: {title}", "")
        done = [task for task, _ in found]
        if left := [task.tables["about"]["title"] for task in tasks if task not in done]:
            yield from wrapped(f"Left out until all rows were run here: {', '.join(left)}.")
        if found:
            yield from wrapped(choice(found))
        for task, board in found:
            yield from wrapped(verdict(board))
            yield from wrapped(why(board))
            yield from table(board)
            yield ""
            if lacking := task.missing(column):
                yield from wrapped(
                    f"Seeds: {board.seeds} of {task.seeds}; {lacking} runs to be made."
                )
            yield from wrapped(refused(task, column))


def refused(task: Task, column: str) -> str:
    """Return which rows cannot be run on a fleet, and why, one sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, error in task.refusals(column).items():
        reason = "no device holds what it needs" if "no device can take part" in error else error
        reasons.setdefault(reason, []).append(f"`{name}`")
    if not reasons:
        return "Every row could be run."
    return "Not run: " + "; ".join(f"{', '.join(n)}: {why}" for why, n in reasons.items()) + "."


def rates(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield the table of rates."""
    yield from ("", "## Chosen rates", "")
    yield from common.table("", *(task.tables["about"]["title"] for task in tasks))
    for row in dict.fromkeys(row for task in tasks for row in task.tables["row"]):
        cells = []
        for task in tasks:
            plain_row, levers = task.rate(row), task.rate(f"{row}, levers")
            said = "" if plain_row is None else f"{plain_row[1]:g}"
            said += "" if levers is None else f", levers {levers[1]:g}"
            server = plain_row is not None and plain_row[0] == "recipe.server_lr"
            cells.append(f"{said}{' (server)' if server else ''}")
        yield f"| {row} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def absent(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield which rows the suites leave out."""
    yield from ("", "## Left out", "")
    known = {name for task in tasks for name in (*task.tables["row"], *task.tables["absent"])}
    if new := sorted(set(methods.names()) - known):
        yield f"- On no task yet: {', '.join(f'`{name}`' for name in new)}."
    for task in tasks:
        reasons: dict[str, list[str]] = {}
        for name, why in task.tables["absent"].items():
            reasons.setdefault(why, []).append(f"`{name}`")
        for name, row in task.tables.get("same", {}).items():
            reasons.setdefault(f"trained as in the row `{row}`", []).append(f"`{name}`")
        said = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        lines = textwrap.wrap(f"{task.tables['about']['title']}: {said}.", 103)
        yield from (f"- {lines[0]}", *(f"  {line}" for line in lines[1:]))


def page(tasks: Sequence[Task]) -> list[str]:
    """Return the lines of the page."""
    lines = PROTOCOL.read_text(encoding="utf-8").splitlines()
    taken = ", ".join(f"{task.tables['about']['title']} {task.hours:.2f}" for task in tasks)
    lines += [
        "",
        f"Hours on the clock, of cores that others used as well: {taken}.",
    ]
    lines += [*fleets(tasks), *sections(tasks), *rates(tasks), *absent(tasks)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip().splitlines()


def short(boards: Sequence[Board]) -> list[str]:
    """Return the short form: of each task and fleet, the first rows."""
    titles = list(dict.fromkeys(board.title for board in boards))
    lines = common.table("", *titles)
    for fleet in dict.fromkeys(board.fleet_title for board in boards):
        cells = {board.title: _cell(board) for board in boards if board.fleet_title == fleet}
        lines.append(f"| {fleet} | {' | '.join(cells.get(title, '') for title in titles)} |")
    return lines


def _cell(board: Board) -> str:
    def said(row: Standing) -> str:
        return f"{row.name} {percent(row.accuracy)}"

    first, second, third = map(said, board.fair[:3])
    return f"**{first}**; {second}; {third}"


def put_short(boards: Sequence[Board], readme: Path) -> None:
    """Put the short form between its marks in the project's README, if it has them."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if end:
        text = "\n".join(["", *short(boards), ""])
        readme.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


def main() -> None:
    """Write the page, the figures and the short form, or all of it here for a smoke run."""
    arguments = common.parser(__doc__)
    common.add_smoke(arguments)
    readme, figures, project = HERE / "README.md", FILE, PROJECT
    if arguments.parse_args().smoke:
        readme, figures, project = map(
            Path, ("page.smoke.md", "figures.smoke.json", "short.smoke.md")
        )
        project.write_text("\n".join(MARKS), encoding="utf-8")
    tasks = [Task(name) for name in TASKS]
    boards = [b for task in tasks for column in FLEETS if (b := task.board(column)) is not None]
    common.write(page(tasks), readme)
    figures.write_text(json.dumps(plain(boards), indent=1) + "\n", encoding="utf-8")
    put_short(boards, project)


if __name__ == "__main__":
    main()
