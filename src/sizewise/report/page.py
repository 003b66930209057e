"""The report: one HTML file that needs nothing else, neither a server nor a network."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from sizewise.common.structure import format_bytes, format_flops
from sizewise.data.catalog import own_name
from sizewise.errors import ConfigError
from sizewise.report import (
    attendance,
    benefit,
    budgets,
    curves,
    details,
    label_grid,
    markup,
    pieces,
    records,
    remarks,
    sizes,
    summary,
)
from sizewise.report.chart import NARROW, WIDE, Chart, series
from sizewise.report.drawing import DARK, PALETTE
from sizewise.report.records import COSTS, Run, by_row
from sizewise.report.summary import Row, summarise

# Nothing may be fetched, not even by mistake, and no script may run: the values at the pointer are
# in the page already, and CSS shows them.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def rows_of(runs: Sequence[Run], failures: Sequence[tuple[str, str]] = ()) -> list[Row]:
    """Return the table of a comparison; of one run, its only line."""
    rows = [
        summarise(
            name,
            {run.seed: run.totals() for run in some if not run.error},
            next((run.error for run in some if run.error), ""),
        )
        for name, some in by_row(runs).items()
    ]
    return [*rows, *(summarise(name, {}, reason) for name, reason in failures)]


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return all figures of a report."""
    found = [
        *curves.charts(runs),
        curves.loss(runs),
        sizes.chart(runs),
        benefit.chart(runs),
        budgets.chart(runs),
        pieces.chart(runs),
        attendance.chart(runs),
        label_grid.chart(runs),
    ]
    return [chart for chart in found if chart is not None]


def save_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write every figure as SVG, PDF and CSV, for papers."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts(runs):
        drawing = chart.draw(WIDE)
        (folder / f"{chart.name}.svg").write_text(drawing.standalone(), encoding="utf-8")
        (folder / f"{chart.name}.csv").write_text(chart.csv(), encoding="utf-8")
        drawing.pdf(folder / f"{chart.name}.pdf")
        paths += [folder / f"{chart.name}.{ending}" for ending in ("svg", "pdf", "csv")]
    return paths


def write(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of some run folders and comparisons; return where it is.

    Raises:
        ConfigError: It cannot be written there.
    """
    text = html(records.read(folders), records.failures(folders))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {str(out)!r}: {error}") from None
    return out


def html(
    runs: Sequence[Run], failures: Sequence[tuple[str, str]] = (), refresh: int | None = None
) -> str:
    """Return the whole page; one that is to be asked for again after some seconds says so."""
    rows = rows_of(runs, failures)
    figures = {chart.name: chart for chart in charts(runs)}
    title = headline(rows, runs)
    tabs = [figure for name, figure in figures.items() if name in tab_names()]
    rest = [figure for name, figure in figures.items() if name not in tab_names()]
    parts = [
        _header(title, rows, runs),
        _table(rows) if len(rows) > 1 or rows[0].note else "",
        _tabs(tabs, runs[0].metric.capitalize()),
        *(_section(figure, remarks.below(figure.name, runs)) for figure in rest),
        details.section(runs),
        "<footer>Made by sizewise from the run folders. Everything is in this file; it asks for "
        "nothing from the network.</footer>",
    ]
    return document(title, "".join(parts), refresh)


def document(title: str, content: str, refresh: int | None = None) -> str:
    """Return a page with this content, which nothing outside of it can change."""
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{_style()}</style></head><body><main>{content}</main></body></html>\n"
    )


def headline(rows: Sequence[Row], runs: Sequence[Run]) -> str:
    """Return what came out, in a few words; methods within their spreads are called close."""
    data = own_name(runs[0].config["data"]["name"])
    ranked = sorted((row for row in rows if row.accuracy), key=lambda row: -row.mean)
    if not ranked:
        return f"nothing was learned on {data}"
    best, more = ranked[0], _of_sizes(ranked)
    if len(ranked) == 1:
        return f"{best.name} reaches {best.mean:.1%} on {data}{more}"
    second = ranked[1]
    if best.mean - second.mean <= (best.spread or 0.0) + (second.spread or 0.0):
        scores = f"{best.mean:.1%}, {second.mean:.1%}"
        return f"{best.name} and {second.name} are close on {data}: {scores}{more}"
    return f"{best.name} leads on {data} with {best.mean:.1%}{more}"


def _of_sizes(rows: Sequence[Row]) -> str:
    """Return which sizes a headline speaks of, given its rows, the first one first."""
    sized = [row for row in rows if row.best is not None]
    if not sized:
        return ""
    top = max(sized, key=lambda row: row.best or 0.0)
    whose = "" if len(rows) == 1 else f" of {top.name}"
    what = "mean of sizes" if rows[0].main == "mean" else "main size"
    return f" ({what}); the best size{whose} has {top.best:.1%}"


def _header(title: str, rows: Sequence[Row], runs: Sequence[Run]) -> str:
    first = runs[0]
    config, fleet = first.config, first.config["fleet"]
    devices = first.partition.get("devices", fleet.get("devices", 0))
    seeds = len({run.seed for run in runs})
    methods = len({run.config["method"]["name"] for run in runs})
    what = "methods" if methods >= len(rows) else "rows"
    many = f"{len(rows)} {what}, " if len(rows) > 1 else ""
    rounds = len(first.history)
    ended = "" if rounds == config["rounds"] else f" of {config['rounds']}"
    deck = (
        f"{many}{config['model']['name']} on {own_name(config['data']['name'])} "
        f"({config['data']['partition']} split), {devices:,} devices, "
        f"{fleet['per_round']} a round, {rounds}{ended} rounds, "
        f"{seeds} seed{'s' if seeds > 1 else ''}."
    )
    asked = sum(len(run.updates) for run in runs)
    trained = sum(line["refused"] is None for run in runs for line in run.updates)
    best = max((row.mean for row in rows if row.accuracy), default=None)
    metric = first.metric
    sized = [row.best for row in rows if row.best is not None]
    worst = [row.worst for row in rows if row.worst is not None]
    facts = {
        f"best {metric}" if len(rows) > 1 else metric: "none" if best is None else f"{best:.1%}",
        **({"best size": f"{max(sized):.1%}", "worst size": f"{min(worst):.1%}"} if sized else {}),
        "sent, both ways": format_bytes(sum(row.sent * len(row.seeds) for row in rows)),
        "on devices": format_flops(sum(row.flops * len(row.seeds) for row in rows)),
        "updates merged": f"{trained:,} of {asked:,}",
        "largest peak": format_bytes(max(row.peak for row in rows)),
        **_private(runs),
    }
    return (
        f'<header><p class="kicker sans">sizewise report</p><h1>{escape(title)}</h1>'
        f'<p class="deck">{escape(deck)}</p>{markup.facts(facts)}</header>'
    )


def _private(runs: Sequence[Run]) -> dict[str, str]:
    """Return what the rounds of private runs have spent."""
    last = [run.history[-1]["privacy"] for run in runs if "privacy" in run.history[-1]]
    if not last:
        return {}
    spent = sorted(max(line["epsilon"].values()) for line in last)
    shown = f"{spent[0]:.3g}" if len(spent) == 1 else f"{spent[0]:.3g} to {spent[-1]:.3g}"
    some = "" if len(last) == len(runs) else f" in {len(last)} of {len(runs)} runs"
    deltas = " or ".join(f"{delta:g}" for delta in sorted({line["delta"] for line in last}))
    return {f"epsilon, delta {deltas}": f"{shown}{some}"}


def _table(rows: Sequence[Row]) -> str:
    def swatch(number: int) -> str:
        return f'<span class="swatch" style="background:var(--{series(number)[0]})"></span>'

    seeds = list(dict.fromkeys(seed for row in rows for seed in row.seeds))
    words = escape(summary.meaning(rows))
    links = [
        markup.saved("table.csv", "text/csv", summary.comma_separated(rows, seeds), "Table (CSV)"),
        markup.saved("table.md", "text/markdown", summary.markdown(rows), "Markdown"),
        markup.saved("table.tex", "text/plain", summary.latex(rows), "LaTeX"),
    ]
    return (
        '<section id="table"><h2>The table</h2><p class="note">Accuracy is the mean over the '
        f"seeds, ± the standard deviation; costs are means of one run. {words}</p>"
        f'<div class="scroll">{summary.html(rows, swatch)}</div>'
        f'<p class="data">{" · ".join(links)}</p></section>'
    )


def tab_names() -> dict[str, str]:
    """Return the charts that share a place, with the words on their tabs."""
    return {f"accuracy-{key.replace('_', '-')}": words for key, words in COSTS.items()}


def _tabs(figures: Sequence[Chart], metric: str) -> str:
    buttons, panels = "", ""
    for number, figure in enumerate(figures):
        checked = " checked" if number == 0 else ""
        name, words = figure.name, tab_names()[figure.name]
        buttons += f'<input type="radio" name="cost" id="{name}"{checked}>'
        buttons += f'<label for="{name}">{escape(words)}</label>'
        panels += f'<figure class="panel-{name}">{_figure(figure)}</figure>'
    return (
        f"<section><h2>{escape(metric)} against what it cost</h2>"
        f'<div class="tabs">{buttons}{panels}</div></section>'
    )


def _section(chart: Chart, below: str) -> str:
    return (
        f'<section id="{chart.name}"><h2>{escape(chart.title)}</h2>'
        f"<figure>{_figure(chart)}</figure>{below}</section>"
    )


def _figure(chart: Chart) -> str:
    wide = chart.draw(WIDE)
    both = wide.svg('class="wide"') + chart.draw(NARROW).svg('class="narrow"')
    links = [
        markup.saved(f"{chart.name}.csv", "text/csv", chart.csv(), "Data (CSV)"),
        markup.saved(f"{chart.name}.svg", "image/svg+xml", wide.standalone(), "Figure (SVG)"),
    ]
    return f'<p class="note">{escape(chart.note)}</p>{both}<p class="data">{" · ".join(links)}</p>'


def _style() -> str:
    def variables(palette: dict[str, str]) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in palette.items())

    tabs = "".join(f"#{name}:checked ~ .panel-{name} {{ display: block; }}" for name in tab_names())
    return (
        f":root {{ {variables(PALETTE)} }}"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}"
        f"@media print {{ :root {{ {variables(PALETTE)} }} }}"
        f"{Path(__file__).with_name('style.css').read_text(encoding='utf-8')}{tabs}"
    )
