"""The command line. Progress and logs go to stderr; results go to stdout."""

import gc
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import typer
from typer.core import TyperCommand

from sizewise import __version__
from sizewise.common.cores import CORES
from sizewise.common.heap import keep_freed
from sizewise.errors import ConfigError, SizewiseError
from sizewise.flower.commands import flower

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sizewise.config import Config
    from sizewise.runs.federation import Federation
    from sizewise.runs.folder import Totals

# Heavy modules are imported inside the commands: `sizewise list` and `--help` answer at once.

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Default: the embedded config.")
]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change one value: recipe.lr=0.05.")
]
Trackers = Annotated[
    list[str], typer.Option("--track", help="tensorboard, wandb (offline) or mlflow; also several.")
]
Vary = Annotated[
    list[str],
    typer.Option(metavar="KEY=A,B,C", help="Try each value; several: every combination."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, last on stdout.")]

INTERRUPTED = 130


class _Command(TyperCommand):
    """A command whose help is plain text: typer escapes brackets for rich in any case."""

    def get_help(self, ctx: click.Context) -> str:
        return super().get_help(ctx).replace("\\[", "[")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sizewise {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning for devices of every size: budgets in bytes, one model."""


app.add_typer(flower, name="flower")


@app.command()
def run(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    engine: Annotated[
        Literal["local", "flower"], typer.Option(help="flower: on simulated Flower nodes.")
    ] = "local",
    track: Trackers = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Train: one run, in a folder of its own; without a file, the embedded config."""
    from sizewise import config as configs
    from sizewise.runs import session

    chosen = configs.load(config, overrides)
    if engine == "flower":
        _simulate(chosen, out, as_json, track)
    else:
        _train(session.started(chosen, out), as_json, track)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run.")],
    overrides: Overrides = [],  # noqa: B006
    track: Trackers = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped, from its last durable round.

    --set rounds=N makes it longer; engine.workers, engine.save_every, engine.flower and data.root
    may change as well. Anything else would mix two runs.
    """
    from sizewise.runs import session

    _train(session.resumed(run_dir, overrides=overrides), as_json, track)


@app.command()
def plan(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
    vary: Vary = [],  # noqa: B006
    figure: Annotated[Path | None, typer.Option(help="Draw bytes against budgets here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each device class would train, and what it costs; train nothing."""
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


@app.command()
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
    """Run several methods under one protocol; what is done already is not run again."""
    from sizewise import config as configs
    from sizewise.report import comparison, execution, live, page, sweep, tables

    chosen, grid = configs.read(config, overrides), sweep.read(vary)
    rows = sweep.rows(comparison.by_method(chosen, _names(methods)), grid)
    data = configs.from_dict(next(iter(rows.values()))).data.name
    folder = out or comparison.default_folder(chosen, data)
    wanted = comparison.jobs(rows, _numbers(seeds), folder)
    _collect_garbage()
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


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_OR_COMPARISON...")],
    out: Annotated[Path | None, typer.Option(help="The HTML file.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write figures as SVG, PDF and CSV.")
    ] = None,
) -> None:
    """Make one HTML file of a run, of a comparison, or of several of them."""
    from sizewise.report import page, records

    place = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    page.write(folders, place)
    if figures is not None:
        page.save_figures(records.read(folders), figures)
    print(place)


@app.command()
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


@app.command(name="list")
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
        print(f"{name:<{width}}  {description}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Try this machine's devices: a tiny run on each, and predicted bytes against real ones."""
    from sizewise.common.structure import plain
    from sizewise.runs import doctor as doctors

    found = []
    for finding in doctors.examine():
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        print(json.dumps([plain(finding) for finding in found]))
    if any(finding.trouble for finding in found):
        raise typer.Exit(1)


@flower.command(name="new")
def flower_new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the app.")],
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Write a Flower app folder for a config, to be started with `flwr run`."""
    from sizewise import config as configs
    from sizewise.flower import folder as flower_folder

    flower_folder.write(folder, configs.load(config, overrides))
    print(f"wrote {folder}; start it with: flwr run {folder} NAME-OF-YOUR-SUPERLINK --stream")


def _train(opening: "AbstractContextManager[Federation]", as_json: bool, track: list[str]) -> None:
    """Run a federation with a progress line, then print its result."""
    from sizewise.report import progress, tables
    from sizewise.runs import trackers

    names = trackers.checked(track)
    _collect_garbage()
    keep_freed()
    with opening as federation, _interrupts() as came:
        tables.announce(federation)
        tables.announce_changes(federation)
        config, path = federation.config, federation.folder.path
        try:
            with (
                progress.Progress(config.rounds) as bar,
                trackers.opened(names, config, path) as tell,
            ):

                def observe(line: Mapping[str, Any], totals: "Totals") -> None:
                    bar.update(line, totals)
                    tell(line, totals)
                    if came:
                        raise KeyboardInterrupt

                result: Mapping[str, Any] = federation.run(observe)
        except KeyboardInterrupt:
            hint = f"sizewise resume {shlex.quote(str(path))}"
            print(f"interrupted; go on with: {hint}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
    _show(result, as_json)


def _simulate(config: "Config", out: Path | None, as_json: bool, track: list[str]) -> None:
    """Run a federation on simulated Flower nodes, then print its result."""
    from sizewise.errors import ConfigError
    from sizewise.flower import simulation as flower_simulation
    from sizewise.report import progress

    if track:
        raise ConfigError("--track works with --engine local only; leave it out")
    flower_simulation.check_installed()
    _collect_garbage()
    with progress.Progress(config.rounds) as bar:
        result = flower_simulation.run(config, out, bar.update)
    _show(result, as_json)


def _collect_garbage() -> None:
    """Begin to look for garbage, but not in what has been imported."""
    gc.freeze()
    gc.enable()


def _show(result: Mapping[str, Any], as_json: bool) -> None:
    from sizewise.report import tables

    if as_json:
        print(json.dumps(result))
    else:
        tables.show_result(result)


for _registered in (*app.registered_commands, *flower.registered_commands):
    _registered.cls = _Command


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Note interrupts beside raising them: Python drops one that comes in a finaliser."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Run the command line; errors that a user can cause end in one sentence, not a traceback."""
    # One thread: batches are small, and numpy's own threads would only get in the way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What is imported stays. To look for garbage in it takes a fifth of the time of the import.
    gc.disable()
    try:
        app()
    except SizewiseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # The disk is full, or a folder went away: every finished round is still there.
        print(f"error: {error}; mend that, then go on with `sizewise resume`", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        # What is still frozen at the end is never freed, and some libraries complain of leaks.
        gc.unfreeze()


if __name__ == "__main__":
    main()
