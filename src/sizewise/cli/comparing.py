"""The command that trains several methods under one protocol: `compare`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from sizewise.cli.options import INTERRUPTED, AsJson, ConfigFile, Overrides, Vary
from sizewise.cli.training import collect_garbage
from sizewise.common.cores import CORES
from sizewise.errors import ConfigError


def compare(
    config: ConfigFile = None,
    methods: Annotated[
        str, typer.Option(metavar="A,B,C", help="See `sizewise list methods`.")
    ] = "",
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="One run of each method.")] = "0",
    vary: Vary = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Folder of the comparison.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; default: cores.")] = CORES,
    as_json: AsJson = False,
) -> None:
    """Train several methods under one protocol.

    What is done already is not run again.
    """
    from sizewise import config as configs
    from sizewise.report import comparison, execution, live, page, sweep, tables

    chosen, grid = configs.read(config, overrides), sweep.read(vary)
    rows = sweep.rows(comparison.by_method(chosen, _names(methods)), grid)
    data = configs.from_dict(next(iter(rows.values()))).data.name
    folder = out or comparison.default_folder(chosen, data)
    wanted = comparison.jobs(rows, _numbers(seeds), folder)
    collect_garbage()
    try:
        with live.LiveTable(wanted) as table:
            outcomes = execution.carry_out(wanted, jobs, table.update)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    found = comparison.save(folder, outcomes, list(grid))
    if any(outcome.result for outcome in outcomes):
        page.write([folder], folder / "report.html")
    if as_json:
        print(json.dumps({**found, "folder": str(folder)}))
    else:
        tables.show_comparison(comparison.summary_rows(outcomes), folder)
    # A row without a device that can take part is a finding; anything else is a failure.
    failed = [outcome.exit_code for outcome in outcomes if outcome.exit_code not in (0, 3)]
    nobody = all(outcome.exit_code for outcome in outcomes)
    if failed or nobody:
        raise typer.Exit(failed[0] if failed else outcomes[0].exit_code)


def _names(text: str) -> list[str]:
    """Return the parts of a list on the command line, each once."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise ConfigError("--methods names what to compare, such as fedavg,heterofl,fedepth")
    return found


def _numbers(text: str) -> list[int]:
    parts = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--seeds takes whole numbers, such as 0,1,2, not {text!r}")
    return [int(part) for part in parts]
