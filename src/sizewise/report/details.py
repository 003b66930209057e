"""The end of a report: in what its runs differ, their configs, machines and hashes."""

from collections.abc import Sequence
from html import escape

from sizewise.report import differences, markup
from sizewise.report.records import Run, by_row


def section(runs: Sequence[Run]) -> str:
    """Return what says how the runs were made, as HTML."""
    rows = by_row(runs)
    configs = "".join(
        markup.folded(f"Config of {name}", f"<pre>{escape(_config(some[0]))}</pre>")
        for name, some in rows.items()
    )
    facts = {**runs[0].environment, "folders": ", ".join(str(run.folder) for run in runs)}
    environment = markup.terms(facts.items(), "list")
    if found := differences.of_environments(runs):
        names = [f"{run.row}, seed {run.seed}" for run in runs]
        environment += "<p>These runs were made on different machines or with different versions:"
        environment += f"</p>{_differences(names, found)}"
    hashes = [(f"{run.row}, seed {run.seed}", run.result["state_sha256"]) for run in _done(runs)]
    return (
        f'<section id="details"><h2>Config and environment</h2>{_between(runs)}{configs}'
        f"{markup.folded('Environment', environment)}"
        + (markup.folded("Hash of the final weights", markup.terms(hashes, "list")) * bool(hashes))
        + "</section>"
    )


def _config(run: Run) -> str:
    return (run.folder / "config.toml").read_text(encoding="utf-8")


def _done(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.result]


def _between(runs: Sequence[Run]) -> str:
    """Return in what the configs of rows differ."""
    rows = by_row(runs)
    if len(rows) == 1:
        return ""
    found = differences.of_configs(runs)
    if not found:
        return '<p class="note">The configs do not differ.</p>'
    note = (
        "All other keys are the same. An empty cell: that method has no such option, or nothing is "
        "set. Of several seeds, the first."
    )
    return (
        f'<h3>In what the configs differ</h3><p class="note">{note}</p>'
        f"{_differences(list(rows), found)}"
    )


def _differences(names: Sequence[str], found: Sequence[differences.Difference]) -> str:
    return markup.table(("", *names), [(one.key, *one.values) for one in found])
