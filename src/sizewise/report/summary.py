"""The table of a comparison: a row for each method, means and spreads over the seeds."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, stdev
from typing import Any

from sizewise.runs.ranking import ranking

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One method: what it reached, and what that cost, as means over the seeds.

    Attributes:
        name: Its name.
        seeds: The seeds that were run to the end.
        accuracy: Of the main model, by seed, 0 to 1.
        main: Which size that is; "mean" where it is a mean over sizes.
        best: Highest accuracy of any deployed size; None where there is one size only.
        best_size: Which size that is; several where the seeds differ.
        worst: Lowest accuracy; likewise.
        worst_size: Which size that is.
        average: Mean accuracy of the deployed sizes; None where there is one only.
        devices: Mean accuracy of the devices, each with its model on its own samples; None where
            they have no samples for that.
        worst_tenth: That of the worst tenth of them.
        served: How many devices these are.
        steps: Optimiser steps of all devices.
        sent: Bytes, both ways.
        flops: Spent on devices.
        peak: Highest metered peak of any device, in bytes.
        refused: How often a device that was asked did not take part.
        seconds: Wall time.
        note: Why it has no numbers.
    """

    name: str
    seeds: tuple[int, ...] = ()
    accuracy: tuple[float, ...] = ()
    main: str = ""
    best: float | None = None
    best_size: str = ""
    worst: float | None = None
    worst_size: str = ""
    average: float | None = None
    devices: float | None = None
    worst_tenth: float | None = None
    served: float | None = None
    steps: float = 0.0
    sent: float = 0.0
    flops: float = 0.0
    peak: int = 0
    refused: float = 0.0
    seconds: float = 0.0
    note: str = ""

    @property
    def mean(self) -> float:
        """Mean accuracy over the seeds."""
        return fmean(self.accuracy)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation of the accuracy; None for a single seed."""
        return stdev(self.accuracy) if len(self.accuracy) > 1 else None


def summarise(name: str, by_seed: Mapping[int, Result], note: str = "") -> Row:
    """Return the row of a method from the results of its seeds."""
    results = list(by_seed.values())
    if not results:
        return Row(name, note=note)
    ranks = [ranking(result["accuracy"], result["sizes"]) for result in results]
    several = any(len(result["sizes"]) > 1 for result in results)
    return Row(
        name,
        seeds=tuple(by_seed),
        accuracy=tuple(result["accuracy"] for result in results),
        main=_names(rank["main"] or "mean" for rank in ranks),
        best=fmean(rank["best"]["accuracy"] for rank in ranks) if several else None,
        best_size=_names(rank["best"]["size"] for rank in ranks) if several else "",
        worst=fmean(rank["worst"]["accuracy"] for rank in ranks) if several else None,
        worst_size=_names(rank["worst"]["size"] for rank in ranks) if several else "",
        average=fmean(rank["mean"] for rank in ranks) if several else None,
        devices=_of_devices(results, "mean"),
        worst_tenth=_of_devices(results, "worst_tenth"),
        served=_of_devices(results, "devices"),
        steps=fmean(result["steps"] for result in results),
        sent=fmean(result["bytes_up"] + result["bytes_down"] for result in results),
        flops=fmean(result["flops"] for result in results),
        peak=max(peak or 0 for result in results for peak in result["peak_bytes"].values()),
        refused=fmean(sum(r["times"] for r in result["refused"]) for result in results),
        seconds=fmean(result["seconds"] for result in results),
        note=note,
    )


def _of_devices(results: Sequence[Result], figure: str) -> float | None:
    """Return a figure over devices, in the mean over the seeds; None where it was not measured."""
    measured = (result.get("validation") or {} for result in results)
    found = [figures[figure] for figures in measured if figure in figures]
    return fmean(found) if len(found) == len(results) else None


def _names(names: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(names))


@dataclass(frozen=True)
class Column:
    """A column of the table for people: what a method reached, or what that cost."""

    head: str
    cell: Callable[[Row], str]
    cost: bool = True


_FLOPS = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that these rows have something to say in."""
    sized = any(row.best is not None for row in rows)
    refusing = any(row.refused for row in rows)
    work = max((row.flops for row in rows), default=0.0)
    unit, size = next((u for u in _FLOPS if work >= u[1]), _FLOPS[-1])
    brief = max((row.seconds for row in rows), default=0.0) < 120
    found = [
        Column("main size %" if sized else "accuracy %", _accuracy, cost=False),
        Column("by seed", _by_seed, cost=False),
        *(_SIZED if sized else ()),
        *_served(rows),
        Column("refused", lambda row: f"{row.refused:,.0f}") if refusing else None,
        Column("steps", lambda row: f"{row.steps:,.0f}"),
        Column("sent MB", lambda row: f"{row.sent / 1e6:,.1f}"),
        Column(unit, lambda row: f"{row.flops / size:,.3g}"),
        Column("peak MB", lambda row: f"{row.peak / 1e6:.2f}"),
        Column("seconds", lambda row: f"{row.seconds:.0f}")
        if brief
        else Column("minutes", lambda row: f"{row.seconds / 60:.1f}"),
    ]
    return [column for column in found if column is not None]


def _accuracy(row: Row) -> str:
    spread = "" if row.spread is None else f" ± {100 * row.spread:.1f}"
    return f"{100 * row.mean:.1f}{spread}"


def _by_seed(row: Row) -> str:
    return " ".join(f"{100 * score:.1f}" for score in row.accuracy)


def _size(score: float | None, name: str = "") -> str:
    if score is None:
        return ""
    return f"{100 * score:.1f} ({name})" if name else f"{100 * score:.1f}"


_SIZED = (
    Column("best size %", lambda row: _size(row.best, row.best_size), cost=False),
    Column("mean of sizes %", lambda row: _size(row.average), cost=False),
    Column("worst size %", lambda row: _size(row.worst, row.worst_size), cost=False),
)


def _served(rows: Sequence[Row]) -> list[Column]:
    """Return the columns about devices, if they validate."""
    most = max((row.served or 0 for row in rows), default=0)
    if not most:
        return []

    def mean(row: Row) -> str:
        # Of methods that give each device its own model, some may have none yet.
        few = row.served is not None and row.served < most
        return _size(row.devices, f"{row.served:,.0f} devices" if few else "")

    worst = Column("worst 10 % of devices", lambda row: _size(row.worst_tenth), cost=False)
    return [Column("devices %", mean, cost=False), worst]


def meaning(rows: Sequence[Row]) -> str:
    """Return which sizes the accuracies are of, and which samples; "" where there is no choice."""
    words = []
    if any(row.best is not None for row in rows):
        mains = ", ".join(f"{row.name}: {row.main}" for row in rows if row.accuracy)
        words.append(f"Main sizes, the models that a method is about: {mains}.")
    if any(row.devices is not None for row in rows):
        words.append("Devices: each with the model that it runs, on its own validation samples.")
    return " ".join(words)


def cells(row: Row, chosen: Sequence[Column]) -> list[str]:
    """Return a row's cells; of one without numbers, why it has none in the first."""
    if not row.accuracy:
        return [row.note, *[""] * (len(chosen) - 1)]
    return [column.cell(row) for column in chosen]


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    chosen = columns(rows)
    lines = [f"| | {' | '.join(column.head for column in chosen)} |"]
    lines.append("|---" * (len(chosen) + 1) + "|")
    lines += [f"| {row.name} | {' | '.join(cells(row, chosen))} |" for row in rows]
    if words := meaning(rows):
        lines += ["", words]
    return "\n".join(lines) + "\n"


def html(rows: Sequence[Row], mark: Callable[[int], str] = lambda number: "") -> str:
    """Return the table as HTML; `mark` gives what stands before the name of a row."""
    chosen = columns(rows)
    heads = "".join(f"<th>{escape(column.head)}</th>" for column in chosen)
    body = ""
    for number, row in enumerate(rows):
        found = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row, chosen))
        if not row.accuracy:
            found = f'<td class="words" colspan="{len(chosen)}">{escape(row.note)}</td>'
        body += f"<tr><td>{mark(number)}{escape(row.name)}</td>{found}</tr>"
    return f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{body}</tbody></table>"


def latex(rows: Sequence[Row]) -> str:
    """Return the table as LaTeX, for the booktabs package."""
    chosen = columns(rows)
    body = [" & ".join(map(_escape, [row.name, *cells(row, chosen)])) + r" \\" for row in rows]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(chosen)}}}",
        r"\toprule",
        " & ".join(map(_escape, ["", *(column.head for column in chosen)])) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        *([f"% {words}"] if (words := meaning(rows)) else []),
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, f"\\{character}")
    return text.replace("±", r"$\pm$")


def figures(rows: Sequence[Row], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return each row as plain numbers, with one entry for each seed's accuracy."""
    sizes = ("main", "best", "best_size", "worst", "worst_size", "average")
    served = (
        ("devices", "worst_tenth", "served") if any(row.devices is not None for row in rows) else ()
    )
    costs = (*sizes, *served, "steps", "sent", "flops", "peak", "refused", "seconds", "note")
    found = []
    for row in rows:
        scores = dict(zip(row.seeds, row.accuracy, strict=True))
        found.append(
            {
                "method": row.name,
                "accuracy_mean": row.mean if row.accuracy else None,
                "accuracy_sd": row.spread if row.accuracy else None,
                **{f"accuracy_seed_{seed}": scores.get(seed) for seed in seeds},
                **{cost: getattr(row, cost) for cost in costs},
            }
        )
    return found


def comma_separated(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    """Return the table as CSV: plain numbers, one column for each seed's accuracy."""
    out, found = io.StringIO(), figures(rows, seeds)
    writer = csv.DictWriter(out, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return out.getvalue()
