"""Commands that write files to start from: `flower new`."""

from pathlib import Path
from typing import Annotated

import typer

from sizewise.cli.options import ConfigFile, Overrides


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
