"""The command line. Progress and logs go to stderr; results go to stdout."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sizewise.errors import SizewiseError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sizewise.config import Config
    from sizewise.federation import Federation
    from sizewise.run import Totals

# Heavy modules are imported inside the commands: `sizewise list` and `--help` answer at once.

app = typer.Typer(
    help="Federated learning for devices of every size: budgets in bytes, one model.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Default: the embedded config.")
]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change one value: recipe.lr=0.05.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, last on stdout.")]

INTERRUPTED = 130

flower = typer.Typer(help="Many machines: apps for Flower.", no_args_is_help=True)
app.add_typer(flower, name="flower")


@app.command()
def run(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    engine: Annotated[
        Literal["local", "flower"], typer.Option(help="flower: on simulated Flower nodes.")
    ] = "local",
    as_json: AsJson = False,
) -> None:
    """Train: one run, in a folder of its own."""
    from sizewise import config as configs
    from sizewise import session

    chosen = configs.load(config, overrides)
    if engine == "flower":
        _simulate(chosen, out, as_json)
    else:
        _train(session.started(chosen, out), as_json)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run.")], as_json: AsJson = False
) -> None:
    """Go on with a run that was stopped, from its last durable round."""
    from sizewise import session

    _train(session.resumed(run_dir), as_json)


@app.command()
def plan(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
    figure: Annotated[Path | None, typer.Option(help="Draw bytes against budgets here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what each device class would train, and what it costs; train nothing."""
    from sizewise import config as configs
    from sizewise import preview
    from sizewise.report import figures, tables

    rows = preview.rows(configs.load(config, overrides))
    if figure is not None:
        figures.draw_plan(rows, figure)
    if as_json:
        print(json.dumps({"classes": rows}))
    else:
        tables.show_plan(rows)


@app.command(name="list")
def list_names(
    what: Annotated[
        Literal["methods", "models", "datasets", "partitions", "scenarios"], typer.Argument()
    ],
    as_json: AsJson = False,
) -> None:
    """List what a config can name."""
    from sizewise import catalogue

    names = catalogue.names(what)
    if as_json:
        print(json.dumps(names))
        return
    width = max(map(len, names))
    for name, description in names.items():
        print(f"{name:<{width}}  {description}")


@flower.command(name="new")
def flower_new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the app.")],
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Write a Flower app folder for a config, to be started with `flwr run`."""
    from sizewise import config as configs
    from sizewise.engines import flower_folder

    flower_folder.write(folder, configs.load(config, overrides))
    print(f"wrote {folder}; start it with: flwr run {folder} NAME-OF-YOUR-SUPERLINK --stream")


def _train(opening: "AbstractContextManager[Federation]", as_json: bool) -> None:
    """Run a federation with a progress line, then print its result."""
    from sizewise.report import progress, tables

    with opening as federation, _interrupts() as came:
        tables.announce(federation)
        try:
            with progress.Progress(federation.config.rounds) as bar:

                def observe(line: Mapping[str, Any], totals: "Totals") -> None:
                    bar.update(line, totals)
                    if came:
                        raise KeyboardInterrupt

                result: Mapping[str, Any] = federation.run(observe)
        except KeyboardInterrupt:
            path = federation.folder.path
            print(f"interrupted; go on with: sizewise resume {path}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
    _show(result, as_json)


def _simulate(config: "Config", out: Path | None, as_json: bool) -> None:
    """Run a federation on simulated Flower nodes, then print its result."""
    from sizewise.engines import flower_simulation
    from sizewise.report import progress

    flower_simulation.check_installed()
    with progress.Progress(config.rounds) as bar:
        result = flower_simulation.run(config, out, bar.update)
    _show(result, as_json)


def _show(result: Mapping[str, Any], as_json: bool) -> None:
    from sizewise.report import tables

    if as_json:
        print(json.dumps(result))
    else:
        tables.show_result(result)


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


if __name__ == "__main__":
    main()
