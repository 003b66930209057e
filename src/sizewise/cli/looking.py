"""Commands that train nothing: `plan`, `advise`, `list` and `doctor`."""

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Literal

import typer

from sizewise.cli.options import AsJson, ConfigFile, Overrides, Vary


def plan(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
    vary: Vary = [],  # noqa: B006
    figure: Annotated[Path | None, typer.Option(help="Draw bytes against budgets here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each device class would train, and what it costs."""
    from sizewise import config as configs
    from sizewise.common.structure import plain
    from sizewise.report import figures, sweep, tables
    from sizewise.runs import preview

    if vary:
        tried = sweep.rows({"": configs.read(config, overrides)}, sweep.read(vary))
        varied = {name.strip(): preview.rows(configs.from_dict(t)) for name, t in tried.items()}
        if as_json:
            print(json.dumps({"varied": varied}))
        else:
            tables.show_varied(varied)
        return
    rows, cuts = preview.rows_and_cuts(configs.load(config, overrides))
    if figure is not None:
        figures.draw_plan(rows, figure)
    if as_json:
        print(json.dumps({"classes": rows, "cuts": None if cuts is None else plain(cuts)}))
    else:
        tables.show_plan(rows, cuts)


def advise(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
    patience: Annotated[
        float, typer.Option(help="Processor's seconds after which no further method is planned.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Show what every method would do on this fleet, and say which to use; train nothing."""
    from sizewise import config as configs
    from sizewise.report import advice, tables

    found = advice.advise(configs.read(config, overrides), patience)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        tables.show_advice(found)


def list_names(
    what: Annotated[
        Literal["methods", "models", "datasets", "partitions", "scenarios", "profiles"],
        typer.Argument(),
    ],
    as_json: AsJson = False,
) -> None:
    """List what a config can name."""
    from sizewise.runs import catalogue

    names = catalogue.names(what)
    if as_json:
        print(json.dumps(names))
        return
    width = max(map(len, names))
    for name, description in names.items():
        _say(f"{name:<{width}}  {description}", width + 2)


def doctor(as_json: AsJson = False) -> None:
    """Try this machine's devices with a tiny run on each.

    Predicted bytes are compared with real ones.
    """
    from sizewise.common.structure import plain
    from sizewise.runs import doctor as doctors

    found = []
    for finding in doctors.examine():
        found.append(finding)
        if not as_json:
            _say(str(finding))
    if as_json:
        print(json.dumps([plain(finding) for finding in found]))
    if any(finding.trouble for finding in found):
        raise typer.Exit(1)


def _say(text: str, indent: int = 0) -> None:
    """Print a line at once; on a terminal, what is too long goes on below, between words."""
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        text = textwrap.fill(text, columns, subsequent_indent=" " * indent)
    print(text, flush=True)
