"""Tables for the terminal."""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sizewise.common.structure import format_bytes, format_flops
from sizewise.privacy.config import PrivacyConfig
from sizewise.report.advice import PAGE, Advice
from sizewise.report.fitted import Column, fitted
from sizewise.report.summary import Row, columns, meaning
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
        f"{f'{federation.attackers}; ' if federation.attackers.attacks else ''}"
        f"{_private(config.privacy)}"
        f"run folder {federation.folder.path}"
        f"{f'{chr(10)}{cuts}' if cuts else ''}"
        f"{f'{chr(10)}caution: {method.caution}' if method.caution else ''}"
    )


SIMULATED = "; a simulation: privacy.seed tells the noise"


def _private(privacy: PrivacyConfig | None) -> str:
    if privacy is None:
        return ""
    target = "" if privacy.epsilon is None else f" for an epsilon of {privacy.epsilon:g}"
    simulated = "" if privacy.seed is None else SIMULATED
    return f"updates clipped at {privacy.clip:g}, noise {privacy.noise:.4g}{target}{simulated}; "


def announce_changes(federation: Federation) -> None:
    """Say on stderr what of a run's config is different from now on."""
    for sentence in sentences(federation.folder.changes, federation.config.recipe):
        print(sentence, file=sys.stderr)


def show_result(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a finished run: its models, its device classes, who was refused."""
    console = console or Console(highlight=False, markup=False)
    for table in _classes(result, console.width):
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
    if result["validation"]:
        _show_validation(result["validation"], result["best_round"], console)
    if spent := result.get("privacy"):
        said = f"epsilon {spent['epsilon']:.4g} at delta {spent['delta']:g}, for each device"
        console.print(f"private   {said}{SIMULATED if spent['repeatable'] else ''}", soft_wrap=True)
    if samples := result.get("sample_privacy"):
        each = ", ".join(f"{name} {found:.3g}" for name, found in samples["epsilon"].items())
        known = "; a simulation: recipe.sample_seed tells the noise"
        said = f"samples   epsilon {each} at delta {samples['delta']:g}"
        console.print(f"{said}{known if samples['repeatable'] else ''}", soft_wrap=True)
    if result["stopped"]:
        said = f"stopped   after round {result['rounds']}: {result['stopped']}"
        console.print(said, soft_wrap=True)
    up, down = format_bytes(result["bytes_up"]), format_bytes(result["bytes_down"])
    console.print(f"sent      {up} up, {down} down, {format_flops(result['flops'])} on devices")
    console.print(f"time      {result['seconds']:.1f} s for {result['rounds']} rounds")
    console.print(f"folder    {result['run_dir']}", soft_wrap=True)


def _classes(result: Mapping[str, Any], width: int) -> list[Table]:
    """Return what each device class took and, where devices validate, what it got."""
    refused = {refusal["group"] for refusal in result["refused"]}
    served = (result["validation"] or {}).get("classes", {})
    budgets, peaks = result["budget_bytes"], result["peak_bytes"]
    idle = {group: "refused" if group in refused else "not sampled" for group in budgets}
    shares = [
        f"{peaks[g] / bytes_:.0%}" if peaks[g] and bytes_ else "" for g, bytes_ in budgets.items()
    ]
    columns = [
        Column("budget", [_bytes(budget, "unlimited") for budget in budgets.values()]),
        Column("metered peak", [_bytes(peaks[group], idle[group]) for group in budgets]),
        Column("share of budget", shares),
    ]
    if served:
        figures = [_served(served[group]) if group in served else ("", "", "") for group in budgets]
        names = ("devices", "accuracy %", "worst 10 %")
        columns += [Column(name, [each[n] for each in figures]) for n, name in enumerate(names)]
    return fitted(width, [Column("class", list(budgets), right=False)], columns)


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
    lines: list[tuple[str, ...]] = []
    for row in rows:
        what = "nothing" if row["refused"] else row["size"]
        head = (row["group"], f"{row['devices']:,}", what, _bytes(row["budget"], "any"))
        sent = (format_bytes(row["bytes_down"]), format_bytes(row["bytes_up"]))
        work = (*sent, f"{row['steps']:,}", f"{row['flops'] / 1e9:,.3g}")
        lines.append((*head, format_bytes(row["predicted"]), *(_NONE if row["refused"] else work)))
        if not row["refused"] and row["levers"]:
            said = f"  {row['levers']}: {row['more_flops']:.2f} times the FLOPs"
            lines.append(("", "", said, "", "", *_NONE))
        for stage in row["stages"] if len(row["stages"]) > 1 else ():
            needs = format_bytes(stage["bytes"]["peak"])
            numbers = (f"{stage['steps']:,}", f"{stage['flops'] / 1e9:,.3g}")
            lines.append(("", "", f"  {stage['name']}", "", needs, "", "", *numbers))
    names = ("class", "devices", "trains", "budget", "needs", "down", "up", "steps", "GFLOP")
    columns = [
        Column(name, cells, right=name not in ("class", "trains"), wraps=name == "trains")
        for name, cells in zip(names, zip(*lines, strict=True), strict=True)
    ]
    console = console or _console()
    for table in fitted(console.width, columns[:3], columns[3:]):
        console.print(table)
    if cuts is not None:
        console.print(str(cuts), soft_wrap=True)
    for note in ("blocks", "merge", "untrained"):
        if rows and (said := rows[0][note]) is not None:
            console.print(said if isinstance(said, str) else said["said"], soft_wrap=True)
    for row in rows:
        if row["refused"]:
            console.print(f"{row['group']}: {row['refused']}", soft_wrap=True)


def show_advice(advice: Advice, console: Console | None = None) -> None:
    """Print what methods would do on a fleet, and which one to use."""
    board, console = advice.board, console or _console()
    heads = ("reach %", "needs", "sent a round", "FLOP a round", "time a round")
    lines = []
    for fit in advice.fits:
        there = fit.elsewhere
        time = "unknown" if fit.seconds is None else f"{fit.seconds:,.3g} s"
        costs = (format_bytes(fit.peak), format_bytes(fit.sent), format_flops(fit.flops), time)
        worst = "" if there is None or there.worst is None else f"{100 * there.worst:.1f}"
        reached = ("" if there is None else f"{100 * there.accuracy:.1f}", worst)
        lines.append((fit.name, f"{100 * fit.reach:.0f}", *costs, *reached))
    names, *figures = [
        Column(head, cells, right=head != "method")
        for head, cells in zip(
            ("method", *heads, "there: %", "worst class %"), zip(*lines, strict=True), strict=True
        )
    ]
    for table in fitted(console.width, [names], figures):
        console.print(table)
    said = [
        f"A plain training step of the whole model takes {format_bytes(advice.whole)}. There: "
        f"{board.title}, {board.fleet_title}, the fleet of the leaderboard that is most like this "
        f"one ({PAGE}; distance {advice.distance:.2f} of 1, see docs/advise.md); data and models "
        f"are others."
    ]
    said += [f"{name}: {why}" for name, why in advice.refused.items()]
    if advice.left:
        said.append(f"Not planned for want of time (--patience): {'; '.join(advice.left)}.")
    for sentence in (*said, advice.reason()):
        console.print(sentence, soft_wrap=True)


def show_varied(
    varied: Mapping[str, Sequence[Mapping[str, Any]]], console: Console | None = None
) -> None:
    """Print plans of several configs, by what they vary: a line for each class of devices.

    `least` are the fewest bytes that a step can be taken in, with all levers of the recipe.
    """
    lines = []
    for values, rows in varied.items():
        for row in rows:
            head = (values, row["group"], "nothing" if row["refused"] else row["size"])
            least = row["predicted"] if row["refused"] else row["least"]
            sizes = (row["predicted"], least, row["bytes_down"], row["bytes_up"])
            shown = [_bytes(row["budget"], "any"), *map(format_bytes, sizes)]
            lines.append((*head, *shown, f"{row['flops'] / 1e9:,.3g}"))
    names = ("with", "class", "trains", "budget", "needs", "least", "down", "up", "GFLOP")
    columns = [
        Column(name, cells, right=number > 2)
        for number, (name, cells) in enumerate(zip(names, zip(*lines, strict=True), strict=True))
    ]
    console = console or _console()
    for table in fitted(console.width, columns[:3], columns[3:]):
        console.print(table)


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
    for table in comparison_tables(rows, console.width):
        console.print(table)
    if words := meaning(rows):
        console.print(words, soft_wrap=True)
    for row in rows:
        if row.note:
            console.print(f"{row.name}: {row.note}", soft_wrap=True)
    console.print(f"folder    {folder}", soft_wrap=True)
    if any(row.accuracy for row in rows):
        console.print(f"report    {folder / 'report.html'}", soft_wrap=True)


def comparison_tables(rows: Sequence[Row], width: int) -> list[Table]:
    """Return what was reached, then what it cost: in one table where there is room for it."""
    groups: dict[bool, list[Column]] = {False: [], True: []}
    for column in columns(rows):
        cells = [column.cell(row) if row.accuracy else "-" for row in rows]
        groups[column.cost].append(Column(column.head, cells, wraps=True))
    names = Column("", [row.name for row in rows], right=False)
    return fitted(width, [names], *groups.values())


_NONE = ("", "", "", "")
"""What a plan says of traffic and work where there is none."""

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
