"""What several commands share: their arguments, the class of a command, an exit code."""

from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperCommand

ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.toml", help="A file, or - for stdin; default: embedded."),
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


class Command(TyperCommand):
    """A command whose help is plain text: typer escapes brackets for rich in any case."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help with brackets as they were written."""
        return super().get_help(ctx).replace("\\[", "[")
