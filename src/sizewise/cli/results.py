"""Commands on finished runs: `report` and `export`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from sizewise.cli.options import AsJson
from sizewise.errors import ConfigError


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_OR_COMPARISON...")],
    out: Annotated[Path | None, typer.Option(help="The HTML file.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write figures as SVG, PDF and CSV.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve it on this machine while a run goes on.")
    ] = False,
    port: Annotated[int, typer.Option(help="Where --watch serves; 0: any free port.")] = 0,
) -> None:
    """Make one HTML file of a run, a comparison, or several of them."""
    from sizewise.report import page, records
    from sizewise.report import watch as watches

    if watch and (out is not None or figures is not None):
        raise ConfigError("--watch serves the page and writes nothing; leave --out and --figures")
    if watch:
        watches.serve(folders, port, _say_where)
        return
    place = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    page.write(folders, place)
    if figures is not None:
        page.save_figures(records.read(folders), figures)
    print(place)


def _say_where(address: str) -> None:
    print(f"{address} (only on this machine; Ctrl-C ends it)", flush=True)


def export(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run.")],
    memory: Annotated[str | None, typer.Option(help="Bytes of inference, such as 20MB.")] = None,
    size: Annotated[str | None, typer.Option(help="Or the name of a deployed size.")] = None,
    kind: Annotated[
        Literal["safetensors", "onnx", "torch", "peft", "transformers"] | None,
        typer.Option("--format"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file: .safetensors, .onnx, .pt2, .peft or .transformers."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples that a device runs at a time.")] = 1,
    best: Annotated[
        bool, typer.Option("--best", help="Of the best round by validation, not of the last.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model that fits a device, with a model card."""
    from sizewise.common.structure import parse_bytes
    from sizewise.report import tables
    from sizewise.runs import deployment, formats

    ending = formats.FORMATS[kind or "safetensors"]
    place = out or run_dir / f"model{ending}"
    if kind is not None and place.suffix != ending:
        raise ConfigError(f"--format {kind} writes files that end in {ending}, not {str(place)!r}")
    budget = None if memory is None else parse_bytes(memory, "--memory")
    facts = deployment.export(run_dir, place, budget, size, batch, best=best)
    if as_json:
        print(json.dumps(facts))
    else:
        tables.show_export(facts)
