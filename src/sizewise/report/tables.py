"""Tables for the terminal."""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from sizewise.common.structure import format_bytes, format_flops
from sizewise.report.summary import Column, Row, cells, columns, meaning
from sizewise.runs.cuts import Cuts, read
from sizewise.runs.federation import Federation
from sizewise.runs.ranking import ranking
from sizewise.runs.resuming import sentences


def announce(federation: Federation) -> None:
    """Say on stderr what is about to happen, and what the method lets out of a device."""
    config, method = federation.config, federation.method
    disclosed = ", ".join(sorted(method.discloses)) or "nothing"
    share = config.data.validation
    kept = f"they keep {share:.0%} of their samples to validate on; " if share else ""
    cuts = read(federation.folder.path)
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(
        f"{config.method.name} on {config.data.name} ({config.data.partition}), "
        f"{config.model.name}, {federation.fleet.total:,} devices, {config.fleet.per_round} a "
        f"round, norm policy {config.recipe.norm}; devices disclose: {disclosed}; "
        f"{'budgets are ignored; ' if method.options.ignores_budgets else ''}"
        f"{kept}"
        f"run folder {federation.folder.path}"
        f"{f'{chr(10)}{cuts}' if cuts else ''}"
        f"{f'{chr(10)}caution: {method.caution}' if method.caution else ''}"
    )


def announce_changes(federation: Federation) -> None:
    """Say on stderr what of a run's config is different from now on."""
    for sentence in sentences(federation.folder.changes, federation.config.recipe):
        print(sentence, file=sys.stderr)


def show_result(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a finished run: its models, its device classes, who was refused."""
    console = console or Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("class")
    table.add_column("budget", justify="right")
    table.add_column("metered peak", justify="right")
    table.add_column("share of budget", justify="right")
    validation = result["validation"] or {}
    classes = validation.get("classes", {})
    for name in ("devices", "accuracy %", "worst 10 %") if classes else ():
        table.add_column(name, justify="right")
    refused = {refusal["group"] for refusal in result["refused"]}
    for group, budget in result["budget_bytes"].items():
        peak = result["peak_bytes"][group]
        idle = "refused" if group in refused else "not sampled"
        share = f"{peak / budget:.0%}" if peak and budget else ""
        served = _served(classes[group]) if group in classes else ()
        table.add_row(group, _bytes(budget, "unlimited"), _bytes(peak, idle), share, *served)
    console.print(table)
    sizes = list(result["sizes"].items())
    if len(sizes) > 1:
        shown = ", ".join(f"{size} {accuracy:.1%}" for size, accuracy in sizes[:12])
        console.print(f"by size   {shown}{' ...' if len(sizes) > 12 else ''}")
        rank = ranking(result["accuracy"], result["sizes"])
        best, worst = (f"{rank[k]['accuracy']:.1%} ({rank[k]['size']})" for k in ("best", "worst"))
        console.print(f"          best {best}, worst {worst}, mean {rank['mean']:.1%}")
    for refusal in result["refused"]:
        who = f"{refusal['group']} devices (e.g. {refusal['devices'][0]})"
        console.print(f"refused   {who}, {refusal['times']} times: {refusal['reason']}")
    accuracy = result["accuracy"]
    title = result["metric"].ljust(8)
    which = f" ({result['main'] or 'mean over sizes'})" if len(sizes) > 1 else ""
    score = f"{accuracy:.1%}{which}" if accuracy is not None else "unknown"
    console.print(f"{title}  {score}")
    for size, value in result.get("perplexity", {}).items():
        console.print(
            f"perplexity {value:,.1f} ({size})" if value else f"perplexity unknown ({size})"
        )
    if validation:
        _show_validation(validation, result["best_round"], console)
    if result["stopped"]:
        said = f"stopped   after round {result['rounds']}: {result['stopped']}"
        console.print(said, soft_wrap=True)
    up, down = format_bytes(result["bytes_up"]), format_bytes(result["bytes_down"])
    console.print(f"sent      {up} up, {down} down, {format_flops(result['flops'])} on devices")
    console.print(f"time      {result['seconds']:.1f} s for {result['rounds']} rounds")
    console.print(f"folder    {result['run_dir']}", soft_wrap=True)


def _served(figures: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{figures['devices']:,}",
        f"{100 * figures['mean']:.1f} ± {100 * figures['deviation']:.1f}",
        f"{100 * figures['worst_tenth']:.1f}",
    )


def _show_validation(
    validation: Mapping[str, Any], best: Mapping[str, Any], console: Console
) -> None:
    """Print what devices get on samples of their own, and when that was best."""
    if "mean" in validation:
        count, mean, worst = _served(validation)
        console.print(f"devices   {mean} % over {count} devices, {worst} % over their worst tenth")
    console.print(
        f"validated {validation['score']:.1%}; best {best['score']:.1%} in round {best['round']}, "
        f"when the test set gave {best['accuracy']:.1%}"
    )


def show_plan(
    rows: Sequence[Mapping[str, Any]], cuts: Cuts | None = None, console: Console | None = None
) -> None:
    """Print what `preview.rows_and_cuts` gives, stage by stage where there are several."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("class")
    table.add_column("devices", justify="right")
    table.add_column("trains")
    for name in ("budget", "needs", "down", "up", "steps", "GFLOP"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        what = "nothing" if row["refused"] else row["size"]
        head = (row["group"], f"{row['devices']:,}", what, _bytes(row["budget"], "any"))
        sent = (format_bytes(row["bytes_down"]), format_bytes(row["bytes_up"]))
        work = () if row["refused"] else (*sent, f"{row['steps']:,}", f"{row['flops'] / 1e9:,.3g}")
        table.add_row(*head, format_bytes(row["predicted"]), *work)
        if not row["refused"] and row["levers"]:
            table.add_row("", "", f"  {row['levers']}: {row['more_flops']:.2f} times the FLOPs")
        for stage in row["stages"] if len(row["stages"]) > 1 else ():
            needs = format_bytes(stage["bytes"]["peak"])
            numbers = (f"{stage['steps']:,}", f"{stage['flops'] / 1e9:,.3g}")
            table.add_row("", "", f"  {stage['name']}", "", needs, "", "", *numbers)
    console = console or _console()
    console.print(table)
    for said in (None if cuts is None else str(cuts), rows[0]["blocks"] if rows else None):
        if said is not None:
            console.print(said, soft_wrap=True)
    for row in rows:
        if row["refused"]:
            console.print(f"{row['group']}: {row['refused']}", soft_wrap=True)


def show_varied(
    varied: Mapping[str, Sequence[Mapping[str, Any]]], console: Console | None = None
) -> None:
    """Print plans of several configs, by what they vary: a line for each class of devices.

    `least` are the fewest bytes that a step can be taken in, with all levers of the recipe.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("with", "class", "trains"):
        table.add_column(name)
    for name in ("budget", "needs", "least", "down", "up", "GFLOP"):
        table.add_column(name, justify="right", no_wrap=True)
    for values, rows in varied.items():
        for row in rows:
            head = (values, row["group"], "nothing" if row["refused"] else row["size"])
            least = row["predicted"] if row["refused"] else row["least"]
            sizes = (row["predicted"], least, row["bytes_down"], row["bytes_up"])
            shown = [_bytes(row["budget"], "any"), *map(format_bytes, sizes)]
            table.add_row(*head, *shown, f"{row['flops'] / 1e9:,.3g}")
    (console or _console()).print(table)


def show_export(facts: Mapping[str, Any]) -> None:
    """Print what was exported."""
    console = Console(highlight=False, markup=False)
    what = f"{facts['parameters']:,} parameters, after round {facts['round']}"
    console.print(f"size      {facts['size']}, {what}")
    console.print(f"{facts['metric']:<9} {facts['accuracy']:.1%}, measured on what was written")
    samples = "one sample" if facts["batch"] == 1 else f"a batch of {facts['batch']}"
    console.print(f"memory    {format_bytes(facts['peak_bytes'])} at the peak for {samples}")
    if facts["difference"] is not None:
        console.print(f"checked   logits within {facts['difference']:.2g} of torch's")
    card = Path(facts["file"]).with_suffix(".md").name
    console.print(f"file      {facts['file']} ({card} describes it)", soft_wrap=True)


def show_comparison(rows: Sequence[Row], folder: Path, console: Console | None = None) -> None:
    """Print the table of a comparison, and where its files are."""
    console = console or _console()
    for table in comparison_tables(rows, console):
        console.print(table)
    if words := meaning(rows):
        console.print(words, soft_wrap=True)
    for row in rows:
        if row.note:
            console.print(f"{row.name}: {row.note}", soft_wrap=True)
    console.print(f"folder    {folder}", soft_wrap=True)
    if any(row.accuracy for row in rows):
        console.print(f"report    {folder / 'report.html'}", soft_wrap=True)


def comparison_tables(rows: Sequence[Row], console: Console) -> list[Table]:
    """Return the table of a comparison; where it is too wide, several that are not.

    What was reached comes first, then what it cost. Cells of several may go on in the next line,
    but no word is broken.
    """
    chosen = columns(rows)

    def needs(part: Sequence[Column]) -> Measurement:
        uncut = console.options.update(max_width=UNCUT)
        return console.measure(_comparison_table(rows, part), options=uncut)

    if needs(chosen).maximum <= console.width:
        return [_comparison_table(rows, chosen)]
    parts: list[list[Column]] = []
    for cost in (False, True):
        parts.append([])
        for column in (column for column in chosen if column.cost == cost):
            if parts[-1] and needs([*parts[-1], column]).minimum > console.width:
                parts.append([])
            parts[-1].append(column)
    return [_comparison_table(rows, part) for part in parts]


def _comparison_table(rows: Sequence[Row], chosen: Sequence[Column]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in chosen:
        table.add_column(column.head, justify="right", overflow="fold")
    for row in rows:
        table.add_row(row.name, *(cells(row, chosen) if row.accuracy else ["-"] * len(chosen)))
    return table


UNCUT = 1000
"""Columns of what is not a terminal: a file has no edge at which to cut a table."""


def _console() -> Console:
    terminal = sys.stdout.isatty()
    return Console(highlight=False, markup=False, width=None if terminal else UNCUT)


def text(show: Callable[[Console], None]) -> str:
    """Return what a function prints, as wide as the terminal, or uncut where there is none."""
    out = io.StringIO()
    console = Console(
        file=out,
        highlight=False,
        markup=False,
        width=_console().width,
        # In a notebook, rich would show it at once, and in colours.
        force_jupyter=False,
        color_system=None,
    )
    show(console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def _bytes(amount: int | None, otherwise: str) -> str:
    return format_bytes(amount) if amount else otherwise
