"""What is said below a figure: levers, what stays whole, why devices were refused."""

from collections.abc import Iterator, Sequence
from typing import Any

from sizewise.common.structure import format_bytes
from sizewise.report import attendance, markup
from sizewise.report.records import Run, by_row
from sizewise.runs.cuts import SHOWN

REASONS = 20
"""Reasons of refusals that are written out."""


def below(figure: str, runs: Sequence[Run]) -> str:
    """Return what belongs below a figure, as HTML."""
    if figure == "pieces":
        return _levers(runs) + _cuts(runs)
    if figure == "participation":
        return _reasons(runs)
    return ""


def _levers(runs: Sequence[Run]) -> str:
    """Return what each class needs, and by which levers it fits."""
    lines: list[tuple[str, dict[str, Any]]] = []
    for name, some in by_row(runs).items():
        taking_part = [entry for entry in some[0].plan if not entry["refused"]]
        lines += zip([name, *[""] * len(taking_part)], taking_part, strict=False)
    if not any(entry.get("levers") for _, entry in lines):
        return '<h3>Levers</h3><p class="note">None were used: every step is a plain one.</p>'
    heads = ("", "class", "trains", "levers", "limit", "needs", "FLOPs, of plain")
    rows = [(name, *_lever_cells(entry)) for name, entry in lines]
    return f"<h3>Levers, which make a step smaller</h3>{markup.table(heads, rows, words=4)}"


def _lever_cells(entry: dict[str, Any]) -> Iterator[str]:
    yield entry["group"]
    yield entry["size"]
    yield entry.get("levers") or "none"
    limit = format_bytes(entry["budget"]) if entry["budget"] else "none"
    for amount in (limit, format_bytes(entry["predicted"])):
        yield amount.replace(" ", "\N{NO-BREAK SPACE}")
    yield f"{entry.get('more_flops', 1.0):.2f}"


def _cuts(runs: Sequence[Run]) -> str:
    """Return how much of the model shrinks with the width, and all that stays whole."""
    said = {name: some[0].cuts for name, some in by_row(runs).items() if some[0].cuts is not None}
    if not said:
        return ""
    text = markup.terms(((name, str(cuts)) for name, cuts in said.items()), "reasons")
    for name, cuts in said.items():
        if len(cuts.whole) > SHOWN:
            clauses = ((str(number), clause) for number, clause in enumerate(cuts.whole, 1))
            text += markup.folded(
                f"All {len(cuts.whole)} parts that stay whole under {name}",
                markup.terms(clauses, "list"),
            )
    return f"<h3>What becomes smaller with the width, and what stays whole</h3>{text}"


def _reasons(runs: Sequence[Run]) -> str:
    found = attendance.reasons(runs)
    if not found:
        return ""
    lines = ((f"{row}, {group}, {times} times", why) for (row, group, why), times in found)
    text = markup.terms(list(lines)[:REASONS], "reasons")
    more = len(found) - REASONS
    left = f'<p class="note">and {more} more, in updates.jsonl</p>' if more > 0 else ""
    return f"<h3>Why devices were refused</h3>{text}{left}"
