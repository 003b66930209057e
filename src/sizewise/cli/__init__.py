"""The command line. Progress and logs go to stderr; results go to stdout.

A module here holds a group of commands: `running`, `looking`, `comparing`, `results`, `writing`;
`training` carries a run out, `starting` has the config of `init`, `options` what commands share.
Heavy modules are imported inside the commands: `sizewise list` and `--help` answer at once. Imports
everything below.
"""

import gc
import os
import sys
from typing import Annotated

import typer

from sizewise import __version__
from sizewise.cli import comparing, looking, results, running, writing
from sizewise.cli.options import INTERRUPTED, Command
from sizewise.errors import SizewiseError
from sizewise.flower.commands import flower

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


# In the order of `sizewise --help`.
app.add_typer(flower, name="flower")
app.command()(writing.init)
app.command()(running.run)
app.command()(running.resume)
app.command()(looking.plan)
app.command()(looking.advise)
app.command()(comparing.compare)
app.command()(results.report)
app.command()(results.export)
app.command(name="list")(looking.list_names)
app.command()(looking.doctor)
flower.command(name="new")(writing.flower_new)

for _registered in (*app.registered_commands, *flower.registered_commands):
    _registered.cls = Command


def main() -> None:
    """Run the command line; errors that a user can cause end in one sentence, not a traceback."""
    # One thread: batches are small, and numpy's own threads would only get in the way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # What is imported stays. To look for garbage in it takes a fifth of the time of the import.
    gc.disable()
    try:
        app(prog_name="sizewise")
    except SizewiseError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"error: {error}; mend that, and try again", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        # What is still frozen at the end is never freed, and some libraries complain of leaks.
        gc.unfreeze()
