"""Commands that write files to start from: `init` and `flower new`."""

import shlex
import sys
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from sizewise.cli import starting
from sizewise.cli.options import ConfigFile, Overrides
from sizewise.errors import ConfigError


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Where to write it.")] = Path(
        "sizewise.toml"
    ),
    data: Annotated[str | None, typer.Option(help="A listed name, a folder or a file.")] = None,
    model: Annotated[str | None, typer.Option(help="A listed name, or your own.")] = None,
    budgets: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Bytes of device classes: 20MB,58MB.")
    ] = None,
    method: Annotated[str, typer.Option(help="See `sizewise list methods`.")] = "fedepth",
) -> None:
    """Write a commented config; asks three questions.

    Flags answer them beforehand; without a terminal, so do defaults.
    """
    from sizewise import config as configs
    from sizewise import models

    if file.exists():
        raise ConfigError(f"{str(file)!r} exists; choose another name, or remove it first")
    data = data or _asked("data: a listed name, a folder, a file", "digits")
    model = model or _asked(
        "model: a listed name, or package.module:factory", starting.usual_model(data)
    )
    usual = ",".join(starting.usual_budgets(data))
    chosen = budgets or _asked("bytes that your devices have for a training step", usual)
    text = starting.config(starting.Answers(data, model, starting.names(chosen), method))
    # Whatever cannot be is said before there is a file.
    configs.from_dict(tomllib.loads(text))
    if ":" not in model:
        models.factory(model)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be written: {error}") from None
    name = shlex.quote(str(file))
    print(f"wrote {name}; what fits, and then the run:")
    print(f"  sizewise plan {name}\n  sizewise run {name}")


def _asked(question: str, usual: str) -> str:
    """Return what somebody answers; without a terminal, or with an empty answer, the usual."""
    if not sys.stdin.isatty():
        return usual
    return str(typer.prompt(question, default=usual, err=True)).strip()


def flower_new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the app.")],
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Write a Flower app folder for a config, to be started with `flwr run`."""
    from sizewise import config as configs
    from sizewise.flower import folder as flower_folder

    flower_folder.write(folder, configs.load(config, overrides))
    name = shlex.quote(str(folder))
    print(f"wrote {name}; start it with: flwr run {name} NAME-OF-YOUR-SUPERLINK --stream")
